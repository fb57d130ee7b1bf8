"""What a run leaves behind: `metrics.jsonl` line by line, progress, and the summary at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from fxpipe.errors import RunError
from fxpipe.plan import Plan
from fxpipe.runtime.executor import Executor
from fxpipe.runtime.progress import Progress
from fxpipe.runtime.staleness import staleness_file

OnStep = Callable[[int, float, "float | None", "float | None"], None]
"""Told of a minibatch that is through: its number, its loss, worker 0's learning rate if it trains, and the norm of all
gradients if they are clipped."""
METRICS = "metrics.jsonl"
FINAL_WEIGHTS = "model.safetensors"


class Record:
    """Collects a run's steps on worker 0.

    A line of `metrics.jsonl` is `{"step", "loss", "lr", "grad_norm", "seconds", "samples_per_second"}`: steps count
    from 1, `seconds` since training began, `samples_per_second` of this step alone; `loss` and `grad_norm` are null
    when they are no finite numbers. `lr` (of worker 0's optimizer, used in this step) stands there only if worker 0
    trains parameters, `grad_norm` (of all workers' gradients, before they were clipped) only with clipping.
    """

    def __init__(self, out: str | Path | None, samples: int, total: int, progress: Progress | None = None) -> None:
        self.out = None if out is None else Path(out)
        self.samples = samples
        self.total = total
        self.losses: list[float] = []
        self._progress = progress
        self._file: TextIO | None = None
        if self.out is not None:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                for old in (self.out / FINAL_WEIGHTS, *self.out.glob(staleness_file("*"))):
                    old.unlink(missing_ok=True)  # an earlier run's, beside this one's metrics
                self._file = (self.out / METRICS).open("w", buffering=1, encoding="utf-8")
            except OSError as error:
                raise RunError(
                    f"{self.out} cannot be written: {error.strerror}", hint="choose another --out"
                ) from error
        self._begin = self._last = perf_counter()

    def begin(self) -> None:
        """Training begins now."""
        self._begin = self._last = perf_counter()

    def step(self, minibatch: int, loss: float, lr: float | None, norm: float | None) -> None:
        """A minibatch is through."""
        now = perf_counter()
        rate = self.samples / max(now - self._last, 1e-9)
        self._last = now
        self.losses.append(loss)
        if self._file is not None:
            line: dict[str, Any] = {"step": minibatch + 1, "loss": loss if math.isfinite(loss) else None}
            if lr is not None:
                line["lr"] = lr
            if norm is not None:
                line["grad_norm"] = norm if math.isfinite(norm) else None
            line |= {"seconds": round(now - self._begin, 6), "samples_per_second": round(rate, 3)}
            self._file.write(json.dumps(line) + "\n")
        if self._progress is not None:
            self._progress(minibatch + 1, self.total, loss, rate)

    def close(self) -> None:
        """End the display and the file."""
        if self._progress is not None:
            self._progress.close()
        if self._file is not None:
            self._file.close()

    @property
    def seconds(self) -> float:
        """From the beginning of training to the last step."""
        return self._last - self._begin

    def summary(self, workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The run in one JSON object."""
        steps = len(self.losses)
        return {
            "steps": steps,
            "losses": self.losses,
            "seconds": self.seconds,
            "samples_per_second": steps * self.samples / max(self.seconds, 1e-9),
            "workers": list(workers),
            "out": None if self.out is None else str(self.out),
        }


def worker_row(executor: Executor, seconds: float) -> dict[str, Any]:
    """A worker in the summary: `engines` run its forward and its backward; `busy` is the share of the wall time spent
    in actions without their waits; `forward_ms` and `backward_ms` are means over actions, `wait_ms` over pairs of them
    (microbatches); `staleness` is there if it was logged (see `StalenessLog.summary`)."""
    times, log = executor.times, executor.store.staleness
    if log is not None:
        log.close()
    row = {
        "rank": executor.worker,
        "engines": list(executor.stage.engines),
        "busy": (times.forward + times.backward) / max(seconds, 1e-9),
        "forward_ms": 1000 * times.forward / max(times.forwards, 1),
        "backward_ms": 1000 * times.backward / max(times.backwards, 1),
        "wait_ms": 1000 * times.waited / max(times.backwards, 1),
    }
    return row if log is None else row | {"staleness": log.summary()}


def samples_of(plan: Plan) -> int:
    """Samples in a minibatch: dimension 0 of the first tensor of the batch, times the microbatches."""
    shapes = [leaf.tensor.shape for leaf in plan.batch if leaf.tensor is not None and leaf.tensor.shape]
    return (shapes[0][0] if shapes else 1) * plan.microbatches
