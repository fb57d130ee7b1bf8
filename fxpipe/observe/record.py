"""What a run shows and writes while it trains: `metrics.jsonl`, the display, TensorBoard."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from fxpipe.errors import RunError
from fxpipe.observe.live import Board, Looker
from fxpipe.observe.progress import Progress
from fxpipe.observe.run_folder import METRICS, RUN, staleness_file
from fxpipe.observe.tensorboard import TensorboardLog
from fxpipe.plan.spec import Plan

OnStep = Callable[[int, float, "float | None", "float | None"], None]
"""Called after a minibatch with its number, its loss, worker 0's learning rate if it trains, and the norm of all
gradients if they are clipped."""
OnEvaluation = Callable[[int, "dict[str, float]", float], None]
"""Called after an evaluation with the number of steps, the means of all metrics, and the seconds that worker 0 took."""
FINAL_WEIGHTS = "model.safetensors"
AVERAGED_WEIGHTS = "ema.safetensors"
LOOK = 5.0
"""Seconds between two records of the workers in TensorBoard's file."""

STEADY = 4
"""The fewest steps that can have a steady state."""


class Record:
    """Collects a run's steps on worker 0.

    A line of `metrics.jsonl` is `{"step", "loss", "lr", "grad_norm", "seconds", "samples_per_second"}`: steps count
    from 1, `seconds` is the time since training began and `samples_per_second` that of this step alone, both without
    evaluations; `loss` and `grad_norm` are null if they are not finite. `lr` (of worker 0's optimizer, used in this
    step) is there only if it has one, `grad_norm` (of all workers' gradients, before clipping) only
    with clipping. An evaluation has its own line after that of its step: `{"step", "eval": {name: mean}}`.

    Args:
        samples: in a minibatch.

    Attributes:
        samples_of: tells how many samples a minibatch has, where they differ.
        evaluations: `{"step", "metrics"}` each.
        evaluation_seconds: worker 0's, of those before the last step.
    """

    def __init__(
        self,
        out: str | Path | None,
        samples: int,
        total: int,
        progress: Progress | None = None,
        tensorboard: str | None = None,
    ) -> None:
        self.out = None if out is None else Path(out)
        self.samples = samples
        self.samples_of: Callable[[int], int] = lambda minibatch: samples
        self.total = total
        self.losses: list[float] = []
        self.evaluations: list[dict[str, Any]] = []
        self.evaluation_seconds = 0.0
        self._evaluating = 0.0  # of these, those since the last step
        self._ends: list[float] = []
        self._samples: list[int] = []  # of each step
        self._progress = progress
        self._tensorboard = None if tensorboard is None else TensorboardLog(tensorboard)
        self._looker: Looker | None = None
        self._looked = 0.0
        self._file: TextIO | None = None
        if self.out is not None:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                old_names = (FINAL_WEIGHTS, AVERAGED_WEIGHTS, RUN)
                for old in (*(self.out / name for name in old_names), *self.out.glob(staleness_file("*"))):
                    old.unlink(missing_ok=True)  # from an earlier run, next to this one's metrics
                self._file = (self.out / METRICS).open("w", buffering=1, encoding="utf-8")
            except OSError as error:
                raise RunError(
                    f"{self.out} cannot be written: {error.strerror}", hint="choose another --out"
                ) from error
        self._begin = self._last = perf_counter()

    def begin(self, board: Board) -> None:
        """Training begins now; `board` tells what the workers are doing."""
        self._begin = self._last = self._looked = perf_counter()
        self._looker = Looker(board)
        if self._progress is not None:
            self._progress.watch(board)

    def step(self, minibatch: int, loss: float, lr: float | None, norm: float | None) -> None:
        """A minibatch is finished."""
        now = perf_counter()
        self._samples.append(self.samples_of(minibatch))
        rate = self._samples[-1] / max(now - self._last - self._evaluating, 1e-9)
        self._last = now
        self.evaluation_seconds += self._evaluating
        self._evaluating = 0.0
        self._ends.append(now)
        self.losses.append(loss)
        seconds = self.seconds
        if self._file is not None:
            line: dict[str, Any] = {"step": minibatch + 1, "loss": loss if math.isfinite(loss) else None}
            if lr is not None:
                line["lr"] = lr
            if norm is not None:
                line["grad_norm"] = norm if math.isfinite(norm) else None
            line |= {"seconds": round(seconds, 6), "samples_per_second": round(rate, 3)}
            self._file.write(json.dumps(line) + "\n")
        if self._tensorboard is not None:
            self._tensorboard.step(minibatch + 1, loss, lr, norm, rate, seconds)
            if self._looker is not None and now - self._looked >= LOOK:
                self._looked = now
                found = [{"busy": state.busy, "waiting": state.waiting} for state in self._looker.look()]
                self._tensorboard.workers(minibatch + 1, found)
        if self._progress is not None:
            self._progress(minibatch + 1, self.total, loss, rate)

    def evaluated(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """The state after `step` steps was evaluated; worker 0 took `seconds`."""
        self._evaluating += seconds
        self.evaluations.append({"step": step, "metrics": metrics})
        if self._file is not None:
            shown = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            self._file.write(json.dumps({"step": step, "eval": shown}) + "\n")
        if self._tensorboard is not None:
            self._tensorboard.evaluated(step, metrics)
        if self._progress is not None:
            self._progress.evaluated(step, metrics)

    def close(self) -> None:
        """End the display and the file; on an error, TensorBoard's, too."""
        if self._progress is not None:
            self._progress.close()
        if self._file is not None:
            self._file.close()
        if sys.exc_info()[0] is not None:
            self.end(None)

    def end(self, summary: dict[str, Any] | None) -> None:
        """End TensorBoard's file, with the summary of the run if there is one."""
        if self._tensorboard is not None:
            self._tensorboard.close(summary)
            self._tensorboard = None

    @property
    def seconds(self) -> float:
        """From the beginning of training to the last step, without evaluations."""
        return self._last - self._begin - self.evaluation_seconds

    @property
    def samples_per_second(self) -> float:
        """Of the whole run, including the filling and emptying of the pipeline."""
        return sum(self._samples) / max(self.seconds, 1e-9)

    def steady_samples_per_second(self, workers: int, before: int = 0) -> float | None:
        """Between the filling and the emptying of the pipeline; None if there is little between them.

        It fills after the first `before` steps. Steps after an evaluation do not count: the workers first have to get
        into step again.
        """
        first, last = before + workers, len(self._ends) - workers - 1
        disturbed = {
            evaluation["step"] for evaluation in self.evaluations
        }  # the end of one is the beginning of the next
        steps = [end for end in range(first + 1, last + 1) if end not in disturbed]
        if len(steps) < STEADY:
            return None
        samples = sum(self._samples[end] for end in steps)
        return samples / max(sum(self._ends[end] - self._ends[end - 1] for end in steps), 1e-9)


def samples_of(plan: Plan) -> int:
    """Samples in a minibatch: those of the first tensor that is cut, times the microbatches."""
    sizes = [leaf.tensor.shape[leaf.dim] for leaf in plan.given if leaf.tensor is not None and leaf.dim is not None]
    return (sizes[0] if sizes else 1) * plan.microbatches


def samples_by_shape(plan: Plan, shape_of: Callable[[int], int]) -> Callable[[int], int]:
    """How many samples a minibatch has, by the shape of its batch."""
    samples = [samples_of(of_shape) for of_shape in plan.of_shapes]
    return lambda minibatch: samples[shape_of(minibatch)]
