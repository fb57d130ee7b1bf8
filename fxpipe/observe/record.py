"""What a run shows and writes while it trains: `metrics.jsonl`, the display, loggers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from fxpipe.errors import RunError
from fxpipe.messages import warn
from fxpipe.observe.line_file import LineFile
from fxpipe.observe.logger import Logger, Loggers
from fxpipe.observe.out_folder import METRICS, OutFolder
from fxpipe.observe.pace import Pace
from fxpipe.observe.progress import Progress
from fxpipe.observe.pulse import Live, Status
from fxpipe.observe.rates import Work
from fxpipe.observe.run_json import Evaluation, add_evaluation

LOOK = 5.0
"""Seconds between two times that loggers get what the workers are doing."""


@dataclass(frozen=True)
class ScaledStep:
    """A step under a loss scale."""

    scale: float  # what its loss was multiplied by
    skipped: bool  # whether it made no update, because gradients overflowed


@dataclass(frozen=True)
class RecordedStep:
    """A minibatch that is over on worker 0."""

    minibatch: int
    loss: float
    lr: float | None = None  # worker 0's learning rate, if it trains something
    norm: float | None = None  # of all gradients, if they are clipped
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the loss came with
    scaled: ScaledStep | None = None  # how the loss was scaled, if it was

    def line(self, epoch: int | None) -> dict[str, Any]:
        """Its line in `metrics.jsonl`, without what takes time."""
        scale = {"loss_scale": self.scaled.scale, "skipped": self.scaled.skipped or None} if self.scaled else {}
        values = {"metrics": dict(self.metrics) or None, "epoch": epoch, "lr": self.lr, "grad_norm": self.norm, **scale}
        there = {name: value for name, value in values.items() if value is not None}
        return {"step": self.minibatch + 1, "loss": self.loss, **there}

    @property
    def shown(self) -> Mapping[str, float]:
        """What is shown next to the loss."""
        return self.metrics if self.scaled is None else {**self.metrics, "loss_scale": self.scaled.scale}


class Record:
    """Collects a run's steps on worker 0. `docs/reference/files.md` describes the lines of `metrics.jsonl`.

    Training does not end because something cannot be written or shown (see `LineFile`). Loggers get the same numbers:
    `train/loss`, `train/lr`, `train/grad_norm`, the rates and `train/NAME` for each metric that the loss came with; one
    for each value of each worker, like `busy/worker_0`; `eval/NAME` and `averaged/NAME`.

    A run that goes on after a step of an interrupted one (`continue_after`) keeps its lines up to that step, in its own
    folder or from that of the `earlier` one. The evaluation after this step may be made again, and is not written
    again.
    """

    def __init__(
        self,
        out: str | Path | None,
        work_of: Callable[[int], Work],
        total: int,
        progress: Progress | None = None,
        loggers: Sequence[Logger] = (),
        *,
        workers: int = 1,
        continue_after: int | None = None,
        earlier: Path | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.folder: OutFolder | None = None  # `out`, if there is one
        self._work_of = work_of
        self.steps_per_epoch = steps_per_epoch  # how many steps an epoch has, where that is known
        self.total = total
        # of all steps, with those of the lines that were kept; 8 bytes a step, all that grows while a run trains
        self.losses = array("d")
        self.metrics: dict[str, float] = {}  # of the last step
        # `{"step", "metrics"}` each, perhaps with `averaged`, with those that were kept
        self.evaluations: list[Evaluation] = []
        self._earlier = 0.0  # seconds of training before this run went on
        self.pace = Pace(continue_after or 0, workers)  # of the steps since this object was made
        self._progress = progress
        self._workers: Live | None = None
        self._looked = 0.0
        self._file: LineFile | None = None
        if out is not None:
            try:
                self.folder = OutFolder(Path(out), continue_after, earlier)
                if continue_after is not None:
                    self.folder.continue_lines(METRICS, continue_after, self._kept)
                self._file = LineFile(self.folder.own / METRICS, anew=continue_after is None)
            except OSError as error:
                raise RunError(f"{out} cannot be written: {error.strerror}", hint="choose another --out") from error
            if continue_after and len(self.losses) < continue_after:
                warn(f"{self._file.path} has no lines of some of the {continue_after} steps that were made before")
        self._loggers = Loggers(loggers)

    def begin(self, read: Callable[[], list[Status]], noun: str) -> None:
        """Training begins now; `read` and `noun` are those of `Live`."""
        self.pace.begin()
        self._looked = perf_counter()
        self._workers = Live(read, noun)
        if self._progress is not None:
            self._progress.watch(Live(read, noun))

    def step(self, step: RecordedStep) -> None:
        """A minibatch is finished."""
        minibatch = step.minibatch
        rates = self.pace.step(minibatch, self._work_of(minibatch))
        self.losses.append(step.loss)
        self.metrics = dict(step.metrics)
        seconds = self.seconds
        if self._file is not None:
            epoch = None if self.steps_per_epoch is None else minibatch // self.steps_per_epoch + 1
            times = {"seconds": round(seconds, 6), **{name: float(f"{rate:.6g}") for name, rate in rates.items()}}
            self._file.write(step.line(epoch) | times)
        if self._loggers:
            values = {"loss": step.loss, "lr": step.lr, "grad_norm": step.norm, **rates, **step.shown}
            self._loggers.log(minibatch + 1, seconds, {f"train/{n}": v for n, v in values.items() if v is not None})
            if self._workers is not None and perf_counter() - self._looked >= LOOK:
                self._looked = perf_counter()
                states = self._workers.look()
                busy = {f"busy/worker_{k}": state.busy for k, state in enumerate(states)}
                waiting = {f"waiting/worker_{k}": state.waiting for k, state in enumerate(states)}
                self._loggers.log(minibatch + 1, seconds, busy | waiting)
        if self._progress is not None:
            self._show(lambda progress: progress(minibatch + 1, self.total, step.loss, rates, step.shown))

    def evaluated(self, step: int, metrics: dict[str, float], seconds: float, best: bool = False) -> None:
        """The state after `step` steps was evaluated, and is the best so far or not; worker 0 took `seconds`."""
        self.pace.evaluated(step, seconds)
        if any(earlier["step"] == step for earlier in self.evaluations[-1:]):
            return
        self.evaluations.append({"step": step, "metrics": metrics})
        self._tell("eval", step, metrics, {"best": True} if best else {}, "the best so far" if best else "")

    def averages_evaluated(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """The same of the averaged weights, after the weights themselves."""
        self.pace.evaluated(step, seconds)
        if "averaged" not in self.evaluations[-1]:
            self.evaluations[-1]["averaged"] = metrics
            self._tell("averaged", step, metrics, {}, "of the averaged weights")

    def _tell(self, kind: str, step: int, metrics: dict[str, float], more: dict[str, Any], remark: str) -> None:
        """Write and show an evaluation."""
        if self._file is not None:
            self._file.write({"step": step, kind: metrics} | more)
        values = {f"{kind}/{name}": value for name, value in metrics.items()}
        self._loggers.log(step, self.seconds, values)
        if self._progress is not None:
            self._show(lambda progress: progress.evaluated(step, metrics, remark))

    def sync(self) -> None:
        """Sync the metrics so far to the disk, before a checkpoint of this step counts."""
        if self._file is not None:
            self._file.sync()

    def take_place(self, written: Collection[str]) -> None:
        """The trained weights are written: this run's files take the place of an earlier run's
        (`OutFolder.take_place`).
        """
        if self.folder is not None and self._file is not None:
            self.folder.take_place(written)
            self._file.path = self.folder.own / METRICS

    def close(self) -> None:
        """End the display and all files."""
        if self._progress is not None:
            self._show(lambda progress: progress.close())
        if self._file is not None and self.folder is not None:
            self._file.close()
            self.folder.close()
        self._loggers.close()

    @property
    def seconds(self) -> float:
        """Of training, with those before it went on."""
        return self._earlier + self.pace.seconds

    @property
    def problems(self) -> list[dict[str, Any]]:
        """How many lines of a file, or how often a logger's numbers, were lost: `{"file", "lost"}` each."""
        lost = 0 if self._file is None else self._file.lost
        return [*([{"file": METRICS, "lost": lost}] if lost else []), *self._loggers.problems]

    def _kept(self, row: dict[str, Any]) -> None:
        """A line of the run that this one continues."""
        if add_evaluation(row, self.evaluations, _number):
            return
        self.losses.append(_number(row.get("loss")))
        named = row.get("metrics")
        self.metrics = {name: _number(value) for name, value in named.items()} if isinstance(named, dict) else {}
        if isinstance(row.get("seconds"), int | float):
            self._earlier = row["seconds"]

    def _show(self, show: Callable[[Progress], None]) -> None:
        """Show something; the display is dropped when stderr cannot be written."""
        assert self._progress is not None
        try:
            show(self._progress)
        except (OSError, ValueError):  # the latter if it is closed
            self._progress = None


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else math.nan
