"""The metric that `--save-best` names, which evaluation is the best so far, and the file with its weights.

Next to the file is `best.json`, a note of the evaluation with these weights. It is deleted before the weights are
replaced and written after them, so a resumed run knows whether the file has the best weights.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.errors import RunError, near
from fxpipe.files import replaced
from fxpipe.messages import warn
from fxpipe.observe.out_folder import BEST_NOTE, BEST_WEIGHTS, OutFolder
from fxpipe.plan.plan import Plan
from fxpipe.runtime.options import RunOptions

if TYPE_CHECKING:  # the launcher reads the metric, and imports no torch
    from torch import Tensor

Write = Callable[[str, "Sequence[Mapping[str, Tensor]]"], RunError | None]
"""Writes a file of this name with the tensors of this process's workers, by name; returns the error if that fails."""


class BestWeights:
    """The file of one run, in the process of worker 0: it has the weights of the step `held`, or None of this run.

    `best` is the step and the value of the best evaluation before an interruption; None if there was none.
    """

    def __init__(self, folder: OutFolder, write: Write, goal: Goal, best: tuple[int, float] | None = None) -> None:
        self.folder, self._write, self._goal = folder, write, goal
        self._warned = False
        self.held: int | None = None
        if best is not None and (source := self._source(best)) is not None:
            self._take_along(source, best)
        if self.held is None:
            for name in (BEST_NOTE, BEST_WEIGHTS):  # what the interrupted run wrote after its last checkpoint
                (folder.own / name).unlink(missing_ok=True)

    def keep(self, states: Sequence[Mapping[str, Tensor]], best: tuple[int, float]) -> None:
        """Keep these weights, the best so far, of this step and value. If they cannot be written, print a warning."""
        note = self.folder.own / BEST_NOTE
        note.unlink(missing_ok=True)
        error = self._write(BEST_WEIGHTS, states)
        try:
            if error is None:
                self.held = best[0]
                self._write_note(best)
            elif self.held is not None:
                warn(f"{BEST_WEIGHTS} still has the weights of step {self.held}")
        except OSError as refused:
            warn(f"{note} cannot be written: {refused.strerror or refused}; --resume will not know {BEST_WEIGHTS}")
        if error is not None and not self._warned:
            warn(f"the best weights so far are not in their place: {error}")
            self._warned = True

    def _source(self, best: tuple[int, float]) -> Path | None:
        """The folder of the interrupted run that has the weights of that evaluation."""
        for folder in self.folder.before:
            with suppress(OSError, ValueError):
                if json.loads((folder / BEST_NOTE).read_text()) == self._note(best):
                    return folder if (folder / BEST_WEIGHTS).is_file() else None
        return None

    def _take_along(self, source: Path, best: tuple[int, float]) -> None:
        try:
            if source != self.folder.own:
                with (source / BEST_WEIGHTS).open("rb") as there, replaced(self.folder.own / BEST_WEIGHTS) as here:
                    shutil.copyfileobj(there, here)
                self._write_note(best)
            self.held = best[0]
        except OSError as error:
            warn(f"the best weights so far cannot be copied from {source}: {error.strerror or error}")

    def _note(self, best: tuple[int, float]) -> dict[str, Any]:
        step, value = best
        return {"metric": self._goal.metric, "greater": self._goal.greater, "step": step, "value": value}

    def _write_note(self, best: tuple[int, float]) -> None:
        with replaced(self.folder.own / BEST_NOTE) as file:
            file.write(json.dumps(self._note(best)).encode())


SMALLER = ("loss", "error", "perplexity", "ppl", "mse", "mae", "nll", "bpc", "wer", "cer", "fid")
"""Metrics with these endings of their names are better where they are smaller."""

_MONITOR = ". A callback of Lightning gives it as monitor="


@dataclass(frozen=True)
class Goal:
    """A metric, and its better direction."""

    metric: str
    greater: bool

    @staticmethod
    def of(options: RunOptions, plan: Plan) -> Goal | None:
        """What `save_best` asks for, or None; RunError if that cannot be done."""
        if options.save_best is None:
            return None
        if options.eval_every is None:
            raise RunError(
                "--save-best needs --eval-every: the last weights are written in any case",
                hint="--eval-every N, or epoch",
            )
        if options.out is None:
            raise RunError("--save-best needs an output folder", hint="give out=FOLDER, where best.safetensors will be")
        return Goal._named(options.save_best, "--save-best", plan)

    @staticmethod
    def to_go_on(options: RunOptions, plan: Plan) -> Goal | None:
        """What has to improve where there is `patience`, or None; RunError if that cannot be done."""
        if options.patience is None:
            if options.patience_metric is not None or options.min_delta:
                alone = "--min-delta" if options.patience_metric is None else "--patience-metric"
                raise RunError(f"{alone} needs --patience", hint="--patience N")
            return None
        if options.patience_metric is None and options.save_best is None:
            raise RunError(
                "--patience needs a metric that has to improve",
                hint="--patience-metric loss, or --save-best loss to keep the best weights, too",
            )
        if options.eval_every is None:
            raise RunError("--patience needs --eval-every", hint="--eval-every N, or epoch")
        if options.patience_metric is None:
            return Goal.of(options, plan)
        return Goal._named(options.patience_metric, "--patience-metric", plan)

    @staticmethod
    def _named(text: str, option: str, plan: Plan) -> Goal:
        """`accuracy` and `+cost` are better where greater, `-cost` and what is named as a loss where smaller."""
        metric = text[1:] if text[:1] in ("+", "-") else text
        names = metrics_of(plan)
        if lacks(plan, metric):
            raise RunError(
                f"{option}: metrics(model, batch) gives no {metric!r}{near(metric, names)}",
                hint=f"one of {', '.join(names)}; with - before it, smaller is better, with + greater{_MONITOR}",
            )
        smaller = text[0] == "-" or (text[0] != "+" and metric.lower().endswith(SMALLER))
        return Goal(metric, not smaller)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse an evaluation that has no such metric."""
        if self.metric not in metrics:
            raise RunError(
                f"the evaluation gave no {self.metric!r}{near(self.metric, list(metrics))}",
                hint=f"--save-best and --patience-metric take one of {', '.join(metrics)}{_MONITOR}",
            )

    def better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Whether a value is better than another by more than `by`; one that is not finite never is."""
        if not math.isfinite(value):
            return False
        return than is None or (value - by > than if self.greater else value + by < than)

    def __str__(self) -> str:
        return f"{self.metric} ({'greater' if self.greater else 'smaller'} is better)"


def metrics_of(plan: Plan) -> list[str]:
    """The names of a build's metrics, without those that are known after the first evaluation."""
    return list(dict.fromkeys(name for step in plan.evaluations for name in step.numbers))


def lacks(plan: Plan, metric: str) -> bool:
    """Whether no evaluation can give a metric: what `metrics_of_all` gives may be known after the first one."""
    unknown = any(step.gathered and not step.of_all for step in plan.evaluations)
    return metric not in metrics_of(plan) and not unknown
