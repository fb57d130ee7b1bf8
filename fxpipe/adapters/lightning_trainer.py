"""What Lightning's Trainer is given, as options of a compile and of its runs; what is not followed is named."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fxpipe.errors import TaskError, near
from fxpipe.task.what_trains import AGAIN, freezing_methods

REFUSED = {
    "fast_dev_run": "fxpipe run --steps N",
    "overfit_batches": "let train_dataloader() give few batches",
}
"""What would train otherwise: anything but false is an error."""

NOT_FOLLOWED = {
    "devices": "fxpipe compile -n N --dp R says how many processes train",
    "strategy": "fxpipe compile -n N --dp R says how many processes train",
    "num_nodes": "start `fxpipe run` under torchrun on each node",
    "logger": "OUT/metrics.jsonl has each step; fxpipe run --tensorboard DIR",
    "profiler": "fxpipe run --profile N, or --trace FILE",
    "max_time": "end the run by a callback of the model file, on_step",
    "min_epochs": "--patience counts from the first evaluation",
    "min_steps": "--patience counts from the first evaluation",
    "detect_anomaly": "a run ends at the first loss that is not finite",
    "plugins": "nothing takes their place",
}
"""What changes no weights, or only which of them are the last, and is not done: what is given is a warning."""

SILENT = ("ProgressBar", "ModelSummary", "LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor")
"""Callbacks that show what a run shows anyway."""

CHANGES_TRAINING = {
    "StochasticWeightAveraging": "fxpipe run --ema DECAY, or averaged() in the model file",
    "WeightAveraging": "fxpipe run --ema DECAY, or averaged() in the model file",
    "GradientAccumulationScheduler": "accumulate_grad_batches=N",
    "BaseFinetuning": f"choose what trains by requires_grad, in the module; to change it, {AGAIN}",
    "ModelPruning": "prune in the module",
    "LearningRateFinder": "give the rate",
    "BatchSizeFinder": "give the batch size",
}
"""Callbacks without which a training is another one, and what to do."""

AUTOCAST = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16", "32": None, "32-true": None}
"""By the precision of a Trainer, that of `--autocast`."""


@dataclass(frozen=True)
class TrainerSettings:
    """The keywords of a Trainer."""

    given: Mapping[str, Any]  # those that were given; a list for `callbacks`
    defaults: Mapping[str, Any]  # all that there are

    @staticmethod
    def of(keywords: Mapping[str, Any], base: type) -> TrainerSettings:
        """Check the keywords of the Trainer that belongs to Lightning's own class of modules."""
        library = importlib.import_module(base.__module__.partition(".core")[0])
        defaults = {name: p.default for name, p in inspect.signature(library.Trainer).parameters.items()}
        for name in keywords:
            if name not in defaults:
                raise TaskError(
                    f"Trainer takes no {name!r}{near(name, list(defaults))}",
                    hint="data=, train_dataloaders= and val_dataloaders= take what fit() is given",
                )
        callbacks = keywords.get("callbacks") or []
        several = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        settings = TrainerSettings({**keywords, "callbacks": several}, defaults)
        settings._refuse()
        return settings

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.defaults.get(name))

    @property
    def joined(self) -> int:
        """How many batches one update has."""
        return int(self["accumulate_grad_batches"])

    def callback(self, kind: str) -> Any:
        """The first callback of a kind; None if there is none."""
        return next((callback for callback in self["callbacks"] if kind in _kinds(callback)), None)

    def _refuse(self) -> None:
        refusals = [f"{name}={self[name]!r}: {cure}" for name, cure in REFUSED.items() if self[name]]
        if self["gradient_clip_val"] and str(self["gradient_clip_algorithm"] or "norm") == "value":
            refusals.append("gradient_clip_algorithm='value': gradients are clipped by their norm")
        if str(self["precision"] or 32) not in AUTOCAST:
            refusals.append(f"precision={self['precision']!r}: let the factory make the module of that type")
        for callback in self["callbacks"]:
            name = type(callback).__name__
            refusals += [f"{name}: {cure}" for kind, cure in CHANGES_TRAINING.items() if kind in _kinds(callback)]
            refusals += [
                f"{name}.{method} changes requires_grad: {AGAIN}" for method in freezing_methods(type(callback))
            ]
        if refusals:
            raise TaskError(
                "Trainer is given what a pipeline does not do", hint="take it out:\n    " + "\n    ".join(refusals)
            )

    def not_followed(self) -> Iterator[str]:
        """Each setting that is not followed, with what to do instead."""
        for name, cure in NOT_FOLLOWED.items():
            if name in self.given and self[name] not in (None, False, 1, "auto", self.defaults[name]):
                yield f"{name}={self[name]!r} of Trainer is not followed: {cure}"
        if self.joined > 1:
            yield (
                f"accumulate_grad_batches={self.joined}: the loss of an update is the mean over its samples; in "
                "Lightning it is the mean over its batches, also where the last one is smaller"
            )
        stops, saves = self.callback("EarlyStopping"), self.callback("ModelCheckpoint")
        for callback in self["callbacks"]:
            if callback is not stops and callback is not saves and not any(kind in _kinds(callback) for kind in SILENT):
                name = type(callback).__name__
                yield f"{name} of Trainer is not called: a model file has on_step, on_eval and on_epoch"
        for name in ("stopping_threshold", "divergence_threshold"):
            if (value := getattr(stops, name, None)) is not None:
                yield f"{name}={value!r} of EarlyStopping is not followed: on_eval of a model file can end a run"
        if saves is not None and saves.monitor is not None and saves.save_top_k not in (0, 1):
            yield f"save_top_k={saves.save_top_k} of ModelCheckpoint is not followed: the best weights alone are kept"

    def compile_options(self) -> dict[str, Any]:
        """What a compile is given."""
        device = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}.get(str(self["accelerator"]))
        return {
            "seed": _seed(),
            "device": device,
            "autocast": AUTOCAST[str(self["precision"] or 32)],
            "microbatches": self.joined if self.joined > 1 else None,
        }

    def run_options(self, validates: bool, batches: Callable[[], int]) -> dict[str, Any]:
        """What runs are given; `batches` counts those of an epoch."""

        def updates() -> int:
            return -(-batches() // self.joined)

        options = {"seed": _seed(), "clip_norm": self["gradient_clip_val"] or None, **self._length(updates)}
        if (stops := self.callback("EarlyStopping")) is not None and validates:
            options["patience"], options["patience_metric"] = stops.patience, signed(stops.monitor, stops.mode == "max")
            options["min_delta"] = abs(stops.min_delta)
        if (saves := self.callback("ModelCheckpoint")) is not None:
            if saves.monitor is not None and saves.save_top_k and validates:
                options["save_best"] = signed(saves.monitor, saves.mode == "max")
            if saves.monitor is None or saves.save_last:
                options |= {"checkpoint_every": _interval(saves, updates), "keep": max(saves.save_top_k, 1)}
        return options | {"eval_every": self._eval_every(updates, batches) if validates else None}

    def _length(self, updates: Callable[[], int]) -> dict[str, int]:
        """How long to train; by a number of steps where both are limits, and a Trainer stops at the first."""
        epochs, steps = self["max_epochs"] or -1, self["max_steps"]
        if steps > 0:
            return {"steps": min(steps, epochs * updates()) if epochs > 0 else steps}
        return {"epochs": epochs} if epochs > 0 else {}

    def _eval_every(self, updates: Callable[[], int], batches: Callable[[], int]) -> int | str | None:
        epochs, interval = self["check_val_every_n_epoch"], self["val_check_interval"]
        if interval is None or (interval == 1.0 and isinstance(interval, float)):
            return "epoch" if epochs == 1 else epochs * updates()
        if not isinstance(interval, (int, float)):
            raise TaskError(f"val_check_interval={interval!r} is a time", hint="give a number of batches")
        if self.joined == 1 and epochs is None and isinstance(interval, int):
            return interval
        try:
            whole = batches()
        except TypeError:  # the loader has no length
            whole = 0
        every = int(interval * whole) if isinstance(interval, float) else interval
        evenly = whole % self.joined == 0 if epochs is None else epochs == 1 and whole and every and whole % every == 0
        if evenly and every and every % self.joined == 0:
            return every // self.joined
        clause = f" with check_val_every_n_epoch={epochs}" if epochs not in (None, 1) else ""
        many = f"updates of {self.joined} batches" if self.joined > 1 else "batches"
        other = max(every // self.joined, 1) * self.joined
        raise TaskError(
            f"val_check_interval={interval!r}{clause} does not evaluate after equal numbers of {many}, in epochs of "
            f"{whole or 'an unknown number of'} batches",
            hint="val_check_interval=1.0 evaluates after each epoch"
            if whole % self.joined
            else f"val_check_interval={other}, check_val_every_n_epoch=None counts on over all epochs",
        )


def signed(metric: str, greater: bool) -> str:
    """A metric as `--save-best` names it, with its better direction."""
    return f"{'+' if greater else '-'}{metric}"


def _interval(saves: Any, updates: Callable[[], int]) -> str:
    """How often a ModelCheckpoint saves, as `--checkpoint-every` says it."""
    steps, time, epochs = (
        getattr(saves, f"_{name}") for name in ("every_n_train_steps", "train_time_interval", "every_n_epochs")
    )
    if time is not None:
        return f"{int(time.total_seconds())}s"
    return str(steps) if steps else "epoch" if epochs in (None, 1) else str(epochs * updates())


def _kinds(callback: Any) -> set[str]:
    return {kind.__name__ for kind in type(callback).__mro__}


def _seed() -> int | None:
    """What `seed_everything` was given, if it was called."""
    seed = os.environ.get("PL_GLOBAL_SEED", "")
    return int(seed) if seed.isdigit() else None
