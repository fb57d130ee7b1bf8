"""What a run shows and writes while it trains: `metrics.jsonl`, the display, loggers."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from fxpipe.errors import RunError
from fxpipe.files import remove_abandoned
from fxpipe.messages import warn
from fxpipe.observe.line_file import LineFile
from fxpipe.observe.live import Board, Looker
from fxpipe.observe.logger import Logger, Loggers
from fxpipe.observe.progress import Progress
from fxpipe.observe.rates import NO_WORK, Work
from fxpipe.observe.run_folder import METRICS, RUN

FINAL_WEIGHTS = "model.safetensors"
AVERAGED_WEIGHTS = "ema.safetensors"
BEST_WEIGHTS = "best.safetensors"
BEST_NOTE = "best.json"
PROFILE = "profile_{}.json"
"""Of each process."""

LOOK = 5.0
"""Seconds between two times that loggers get what the workers are doing."""

STEADY = 4
"""The fewest steps that can have a steady state."""


@dataclass(frozen=True)
class ScaledStep:
    """A step under a loss scale.

    Attributes:
        scale: what its loss was multiplied by.
        skipped: whether it made no update, because gradients overflowed.
    """

    scale: float
    skipped: bool


@dataclass(frozen=True)
class RecordedStep:
    """A minibatch that is over on worker 0.

    Attributes:
        lr: worker 0's learning rate, if it trains something.
        norm: of all gradients, if they are clipped.
        metrics: what the loss came with.
        scaled: how the loss was scaled, if it was.
    """

    minibatch: int
    loss: float
    lr: float | None = None
    norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    scaled: ScaledStep | None = None

    def line(self, epoch: int | None) -> dict[str, Any]:
        """Its line in `metrics.jsonl`, without what takes time."""
        found: dict[str, Any] = {"step": self.minibatch + 1, "loss": self.loss}
        if self.metrics:
            found["metrics"] = dict(self.metrics)
        found |= {
            name: value
            for name, value in (("epoch", epoch), ("lr", self.lr), ("grad_norm", self.norm))
            if value is not None
        }
        if self.scaled is not None:
            found |= {"loss_scale": self.scaled.scale} | ({"skipped": True} if self.scaled.skipped else {})
        return found

    @property
    def shown(self) -> Mapping[str, float]:
        """What is shown next to the loss."""
        return self.metrics if self.scaled is None else {**self.metrics, "loss_scale": self.scaled.scale}


class Record:
    """Collects a run's steps on worker 0. `docs/reference/files.md` describes the lines of `metrics.jsonl`.

    Nothing in `out` is deleted or changed when a run begins: where an earlier run left `metrics.jsonl`, this one's
    lines go to `metrics.partial.jsonl` until `take_place`. Nor does training end because something cannot be written or
    shown (see `LineFile`).

    Args:
        samples: in a minibatch.
        loggers: get the same numbers: `train/loss`, `train/lr`, `train/grad_norm`, the rates and `train/NAME` for each
            metric that the loss came with; one for each value of each worker, like `busy/worker_0`;
            `eval/NAME` and `averaged/NAME`.
        workers, before: the pipeline has so many workers, and begins to fill after so many steps (see
            `steady_samples_per_second`).
        continue_after: the run goes on after this step of an interrupted one, whose lines up to it are kept, and whose
            later ones are dropped. The evaluation after this step may be made again: it is
            not written again. None begins anew.
        earlier: the output folder of the interrupted run, if it may be another one: its lines are taken over.
        steps_per_epoch: where it is known.
        work_of: gives what a minibatch is, if more is known than its samples, or their number differs.

    Attributes:
        steps_per_epoch: how many steps an epoch has, where that is known.
        losses: of all steps, with those of the lines that were kept; 8 bytes a step, all that grows while a run trains.
        metrics: of the last step.
        evaluations: `{"step", "metrics"}` each, perhaps with `averaged`, with those that were kept.
        evaluation_seconds: worker 0's, of those before the last step.
        own_steps: how many steps were trained since this object was made.

    Raises:
        RunError: `out` cannot be written.
    """

    def __init__(
        self,
        out: str | Path | None,
        samples: int,
        total: int,
        progress: Progress | None = None,
        loggers: Sequence[Logger] = (),
        *,
        workers: int = 1,
        continue_after: int | None = None,
        earlier: Path | None = None,
        steps_per_epoch: int | None = None,
        work_of: Callable[[int], Work] | None = None,
    ) -> None:
        self.out = None if out is None else Path(out)
        self.samples = samples
        self._work_of = work_of or (lambda minibatch: Work(samples))
        self.steps_per_epoch = steps_per_epoch
        self.total = total
        self.losses = array("d")
        self.metrics: dict[str, float] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.evaluation_seconds = 0.0
        self.own_steps = 0
        self._first = continue_after or 0
        self._earlier = 0.0  # seconds of training before this run went on
        self._evaluating = 0.0  # of the evaluations' seconds, those since the last step
        self._work = NO_WORK
        self._steady = _Steady(self._first, self._first + workers, workers)
        self._progress = progress
        self._looker: Looker | None = None
        self._looked = 0.0
        self._file: LineFile | None = None
        if self.out is not None:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                remove_abandoned(self.out)
                self._file = LineFile(
                    self.out / METRICS,
                    continue_after=continue_after,
                    in_place=not (self.out / RUN).exists(),
                    earlier=None if earlier is None else earlier / METRICS,
                    kept=self._kept,
                )
            except OSError as error:
                raise RunError(
                    f"{self.out} cannot be written: {error.strerror}", hint="choose another --out"
                ) from error
            if continue_after and len(self.losses) < continue_after:
                warn(f"{self._file.path} has no lines of some of the {continue_after} steps that were made before")
        self._loggers = Loggers(loggers)
        self._begin = self._last = perf_counter()

    def begin(self, board: Board) -> None:
        """Training begins now; `board` knows what the workers are doing."""
        self._begin = self._last = self._looked = perf_counter()
        self._looker = Looker(board)
        if self._progress is not None:
            self._progress.watch(board)

    def step(self, step: RecordedStep) -> None:
        """A minibatch is finished."""
        now, minibatch = perf_counter(), step.minibatch
        work = self._work_of(minibatch)
        rates = work.rates(now - self._last - self._evaluating)
        self._steady.add(minibatch, work.samples, now - self._last)
        self._last = now
        self.evaluation_seconds += self._evaluating
        self._evaluating = 0.0
        self._work += work
        self.own_steps += 1
        self.losses.append(step.loss)
        self.metrics = dict(step.metrics)
        seconds = self._earlier + self.seconds
        if self._file is not None:
            epoch = None if self.steps_per_epoch is None else minibatch // self.steps_per_epoch + 1
            times = {"seconds": round(seconds, 6), **{name: float(f"{rate:.6g}") for name, rate in rates.items()}}
            self._file.write(step.line(epoch) | times)
        if self._loggers:
            values = {"loss": step.loss, "lr": step.lr, "grad_norm": step.norm, **rates, **step.shown}
            self._loggers.log(minibatch + 1, seconds, {f"train/{n}": v for n, v in values.items() if v is not None})
            if self._looker is not None and now - self._looked >= LOOK:
                self._looked = now
                states = enumerate(self._looker.look())
                found = {k: {"busy": state.busy, "waiting": state.waiting} for k, state in states}
                shares = {f"{name}/worker_{k}": share for k, row in found.items() for name, share in row.items()}
                self._loggers.log(minibatch + 1, seconds, shares)
        if self._progress is not None:
            self._show(lambda progress: progress(minibatch + 1, self.total, step.loss, rates, step.shown))

    def evaluated(self, step: int, metrics: dict[str, float], seconds: float, best: bool = False) -> None:
        """The state after `step` steps was evaluated, and is the best so far or not; worker 0 took `seconds`."""
        self._evaluating += seconds
        if any(earlier["step"] == step for earlier in self.evaluations[-1:]):
            return
        self.evaluations.append({"step": step, "metrics": metrics})
        self._steady.disturbed.add(step)
        if self._file is not None:
            self._file.write({"step": step, "eval": metrics} | ({"best": True} if best else {}))
        values = {f"eval/{name}": value for name, value in metrics.items()}
        self._loggers.log(step, self._earlier + self.seconds, values)
        if self._progress is not None:
            self._show(lambda progress: progress.evaluated(step, metrics, *(["the best so far"] if best else [])))

    def averages_evaluated(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """The same of the averaged weights, after the weights themselves."""
        self._evaluating += seconds
        if "averaged" in self.evaluations[-1]:
            return
        self.evaluations[-1]["averaged"] = metrics
        if self._file is not None:
            self._file.write({"step": step, "averaged": metrics})
        values = {f"averaged/{name}": value for name, value in metrics.items()}
        self._loggers.log(step, self._earlier + self.seconds, values)
        if self._progress is not None:
            self._show(lambda progress: progress.evaluated(step, metrics, "of the averaged weights"))

    def sync(self) -> None:
        """Sync the metrics so far to the disk, before a checkpoint of this step counts."""
        if self._file is not None:
            self._file.sync()

    def take_place(self, written: set[str]) -> None:
        """The trained weights are written: this run's metrics take the place of an earlier run's.

        Weights and profiles of that run that this one did not write anew are removed: the folder never holds two runs'
        files as if they were one's.

        Args:
            written: the names of this run's weights and profiles.
        """
        if self.out is None or self._file is None:
            return
        self._file.take_place()
        profiles = {path.name for path in self.out.glob(PROFILE.format("*"))}
        for old in ({FINAL_WEIGHTS, AVERAGED_WEIGHTS, BEST_WEIGHTS, BEST_NOTE} | profiles) - written:
            with suppress(OSError):
                (self.out / old).unlink()

    def close(self) -> None:
        """End the display and all files."""
        if self._progress is not None:
            self._show(lambda progress: progress.close())
        if self._file is not None:
            self._file.close()
        self._loggers.close()

    @property
    def steps(self) -> int:
        """How many have been made, with those before it went on."""
        return self._first + self.own_steps

    @property
    def problems(self) -> list[dict[str, Any]]:
        """What could not be written at first, or never: `{"file", "late", "lost"}` each, numbers of lines."""
        return [*([] if self._file is None else self._file.problems), *self._loggers.problems]

    @property
    def seconds(self) -> float:
        """From the beginning of training, or from where it went on, to the last step, without evaluations."""
        return self._last - self._begin - self.evaluation_seconds

    @property
    def rates(self) -> dict[str, float]:
        """Of the whole run, or since it went on, including the filling and emptying of the pipeline."""
        return self._work.rates(self.seconds)

    @property
    def steady_samples_per_second(self) -> float | None:
        """Between the filling and the emptying of the pipeline; None if there is little between them.

        Steps after an evaluation do not count: the workers first have to get into step again.
        """
        return self._steady.rate

    def _kept(self, row: dict[str, Any]) -> None:
        """A line of the run that this one continues."""
        for kind in ("eval", "averaged"):
            if isinstance(row.get(kind), dict):
                found = {name: math.nan if value is None else value for name, value in row[kind].items()}
                if kind == "eval":
                    self.evaluations.append({"step": row["step"], "metrics": found})
                elif self.evaluations:
                    self.evaluations[-1]["averaged"] = found
                return
        loss = row.get("loss")
        self.losses.append(loss if isinstance(loss, int | float) else math.nan)
        named = row.get("metrics")
        self.metrics = {n: math.nan if v is None else v for n, v in named.items()} if isinstance(named, dict) else {}
        if isinstance(row.get("seconds"), int | float):
            self._earlier = row["seconds"]

    def _show(self, show: Callable[[Progress], None]) -> None:
        """Show something; the display is dropped when stderr cannot be written."""
        assert self._progress is not None
        try:
            show(self._progress)
        except (OSError, ValueError):  # the latter if it is closed
            self._progress = None


class _Steady:
    """The rate of samples between the steps in which the pipeline fills and those in which it empties.

    Args:
        first: the first step's number.
        filled: steps from this number on count; the one before it is the last in which the pipeline fills.
        emptying: how many of the last steps do not count.
    """

    def __init__(self, first: int, filled: int, emptying: int) -> None:
        self._filled, self._emptying = filled, emptying
        self._newest: deque[tuple[int, int, float]] = deque()  # those in which it may be emptying already
        self._count = self._samples = 0
        self._seconds = 0.0
        self.disturbed: set[int] = set()  # steps before which there was an evaluation

    def add(self, step: int, samples: int, seconds: float) -> None:
        self._newest.append((step, samples, seconds))
        if len(self._newest) <= self._emptying:
            return
        step, samples, seconds = self._newest.popleft()
        if step in self.disturbed:
            self.disturbed.discard(step)
        elif step > self._filled:
            self._count += 1
            self._samples += samples
            self._seconds += seconds

    @property
    def rate(self) -> float | None:
        return None if self._count < STEADY else self._samples / max(self._seconds, 1e-9)
