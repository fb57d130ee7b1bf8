"""The metric that `--save-best` names, which evaluation is the best so far, and the file with its weights.

An earlier run's file stays as it is until this run has ended well; until then this run's file is
`best.partial.safetensors`. Next to each is `best.json`, a note of the evaluation with these weights. It is deleted
before the weights are replaced and written after them, so a resumed run knows whether the file has the best weights.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.errors import RunError, near
from fxpipe.files import replaced
from fxpipe.messages import warn
from fxpipe.observe.record import BEST_NOTE, BEST_WEIGHTS
from fxpipe.plan.spec import Plan
from fxpipe.runtime.options import RunOptions

if TYPE_CHECKING:  # the launcher reads the metric, and imports no torch
    from torch import Tensor

PARTIAL = "best.partial.safetensors"
_NOTES = {BEST_WEIGHTS: BEST_NOTE, PARTIAL: "best.partial.json"}

Write = Callable[[str, "Sequence[Mapping[str, Tensor]]"], RunError | None]
"""Writes a file of this name with the tensors of this process's workers, by name; returns the error if that fails."""


class BestWeights:
    """The file of one run, in the process of worker 0.

    Args:
        write: see `Write`.
        best: the step and the value of the best evaluation before an interruption; None if there was none.
        earlier: the output folder of the interrupted run, if it may be another one.

    Attributes:
        held: the step whose weights the file has; None if it has none of this run.
    """

    def __init__(
        self,
        out: str | Path,
        write: Write,
        goal: Goal,
        best: tuple[int, float] | None = None,
        earlier: Path | None = None,
    ) -> None:
        self._out, self._write, self._goal = Path(out), write, goal
        self._warned = False
        self.held: int | None = None
        elsewhere = earlier is not None and earlier.resolve() != self._out.resolve()
        found = None if best is None else self._find(earlier if elsewhere and earlier else self._out, best)
        self._target = BEST_WEIGHTS
        if found is not None and not elsewhere:
            self._target, self.held = found.name, best[0] if best else None
            return
        self._forget(PARTIAL)
        if self._file(BEST_WEIGHTS).exists():
            self._target = PARTIAL
        if found is not None and best is not None:
            self._take_along(found, best)

    def keep(self, states: Sequence[Mapping[str, Tensor]], best: tuple[int, float]) -> None:
        """Keep these weights, the best so far, of this step and value. If they cannot be written, print a warning."""
        note = self._file(_NOTES[self._target])
        note.unlink(missing_ok=True)
        error = self._write(self._target, states)
        try:
            if error is None:
                self.held = best[0]
                self._write_note(best)
            elif self.held is not None:
                warn(f"{self._target} still has the weights of step {self.held}")
        except OSError as refused:
            warn(f"{note} cannot be written: {refused.strerror or refused}; --resume will not know {self._target}")
        if error is not None and not self._warned:
            warn(f"the best weights so far are not in their place: {error}")
            self._warned = True

    def take_place(self) -> None:
        """The run has trained to its end: replace an earlier run's file by this run's."""
        if self._target == BEST_WEIGHTS:
            return
        with suppress(OSError):
            self._forget(BEST_WEIGHTS)  # another run's
            for source, target in zip((PARTIAL, _NOTES[PARTIAL]), (BEST_WEIGHTS, BEST_NOTE), strict=True):
                if self._file(source).exists():
                    os.replace(self._file(source), self._file(target))
        self._target = BEST_WEIGHTS

    def _find(self, folder: Path, best: tuple[int, float]) -> Path | None:
        """The weights of that evaluation in a folder."""
        for name in (PARTIAL, BEST_WEIGHTS):
            with suppress(OSError, ValueError):
                if json.loads((folder / _NOTES[name]).read_text()) == self._note(best) and (folder / name).is_file():
                    return folder / name
        return None

    def _take_along(self, source: Path, best: tuple[int, float]) -> None:
        try:
            with source.open("rb") as there, replaced(self._file(self._target)) as here:
                shutil.copyfileobj(there, here)
            self.held = best[0]
            self._write_note(best)
        except OSError as error:
            warn(f"the best weights so far cannot be copied from {source}: {error.strerror or error}")
            self.held = None

    def _note(self, best: tuple[int, float]) -> dict[str, Any]:
        step, value = best
        return {"metric": self._goal.metric, "greater": self._goal.greater, "step": step, "value": value}

    def _write_note(self, best: tuple[int, float]) -> None:
        with replaced(self._file(_NOTES[self._target])) as file:
            file.write(json.dumps(self._note(best)).encode())

    def _forget(self, name: str) -> None:
        for each in (_NOTES[name], name):
            self._file(each).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self._out / name


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
        """What `save_best` asks for; None if it asks for nothing.

        Raises:
            RunError: what the options ask for cannot be done.
        """
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
        """What has to improve where there is `patience`; None where there is none.

        Raises:
            RunError: what the options ask for cannot be done.
        """
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
        """`accuracy` and `+cost` are better where they are greater, `-cost` and what is named as a loss where smaller.

        Raises:
            RunError: the build has no such metric.
        """
        metric = text[1:] if text[:1] in ("+", "-") else text
        known = metrics_of(plan)
        if lacks(plan, metric):
            raise RunError(
                f"{option}: metrics(model, batch) gives no {metric!r}{near(metric, known)}",
                hint=f"one of {', '.join(known)}; with - before it, smaller is better, with + greater{_MONITOR}",
            )
        smaller = text[0] == "-" or (text[0] != "+" and metric.lower().endswith(SMALLER))
        return Goal(metric, not smaller)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse an evaluation that has no such metric.

        Raises:
            RunError: names the metrics that it has.
        """
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
