"""What the workers of a run do, and when.

- `fxpipe run --profile` and `--nvtx`: in torch's profiler, or in Nsight Systems.
- `--trace`: every worker's spans, in worker 0's time, in one file. Nothing is sent during training: at the end the
  workers send their columns one after the other to worker 0, which writes each and frees it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import fxpipe
from fxpipe.errors import FxpipeError, PeerLost
from fxpipe.files import temporary
from fxpipe.messages import warn
from fxpipe.observe.out_folder import PROFILE
from fxpipe.observe.trace import KINDS
from fxpipe.observe.trace.writer import TraceWriter
from fxpipe.observe.watch import Ranges, Spans, Watch, span_name
from fxpipe.plan.plan import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.world import World
from fxpipe.runtime.wires.exchange import ClockOffset, aligned, read_offset
from fxpipe.runtime.wires.group import alone, peers
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer

FILLED = 2
"""Steps that are not profiled, and one more for each worker: the pipeline fills, and what is slow once is over."""


@contextmanager
def profiled(
    options: RunOptions, workers: int, steps: range, world: World, watches: Sequence[Watch], observers: list[Observer]
) -> Iterator[dict[str, str]]:
    """Show what the workers here do inside, where the options ask for it. Yields what `run.json` has of it for each
    worker here; at the end, `profile` is the name of the file."""
    row: dict[str, str] = {}
    profiler: _TorchProfile | None = None
    ranges = Ranges(torch.cuda.nvtx.range, on=True) if options.nvtx else Ranges(record_function, on=False)
    if options.profile is not None and options.out is not None and steps:
        profiler = _TorchProfile(profiled_steps(options.profile, workers, steps), world.device, ranges)
        observers.append(profiler)
    if options.nvtx or profiler is not None:
        world.turns.ranges = ranges
        for watch in watches:
            watch.ranges = ranges
    try:
        yield row
        path = Path(options.out or "", PROFILE.format(world.here[0]))
        if profiler is not None and profiler.write(path):
            row["profile"] = path.name
    except BaseException:
        if profiler is not None and world.alone:  # else the process ends, and its device may wait for a lost one
            with suppress(RuntimeError):
                profiler.stop()
        raise
    finally:
        ranges.leave()


def profiled_steps(asked: int, workers: int, steps: range) -> range:
    """The asked number of a run's steps, once the pipeline is full; of a short run the last ones."""
    first = min(steps.start + workers + FILLED, max(steps.stop - asked, steps.start))
    return range(first, min(first + asked, steps.stop))


class _TorchProfile(Observer):
    """Profiles this thread from the first forward here in the first of some steps until the one after the last."""

    def __init__(self, steps: range, device: torch.device, ranges: Ranges) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it reports each start and stop
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._steps, self._ranges, self._profile = steps, ranges, profile(activities=kinds)
        self._profile.prepare_trace()
        self._begun = self._ended = False

    def begins(self, minibatch: int) -> None:
        if minibatch >= self._steps.stop:
            self.stop()
        elif minibatch >= self._steps.start and not self._begun:
            self._begun = True
            self._profile.start_trace()
            self._ranges.switch(True)

    def stop(self) -> None:
        """The last of the steps is over, or the run is; the process may have another profiler."""
        if self._ended:
            return
        self._ended = True
        self._ranges.switch(False)
        if not self._begun:
            self._profile.start_trace()
        self._profile.stop_trace()

    def write(self, path: Path) -> bool:
        """Write what was profiled in Chrome's trace format; if there is nothing, or that fails, print a warning."""
        self.stop()
        if not self._begun:
            warn(f"nothing was profiled: the run ended before step {self._steps.start + 1}")
            return False
        fresh = temporary(path)
        try:
            self._profile.export_chrome_trace(str(fresh))  # it removes a file that it cannot write whole
            fresh.replace(path)
        except (OSError, RuntimeError) as error:
            warn(f"the profile is lost: torch could not write {path}: {error}")
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            return False
        return True


@dataclass(frozen=True)
class WorkerTrace:
    """What one worker recorded. The spans are in its own time; `before` and `after` training, worker 0's clock had
    these offsets from its own."""

    spans: Spans
    before: ClockOffset
    after: ClockOffset


def write_trace(path: str, plan: Plan, recipe: Recipe, seconds: float, traces: Iterable[WorkerTrace]) -> None:
    """Write the file, on worker 0.

    Time 0 is when worker 0 first read its clock, before any worker began to train. The traces are those of the `seats`.

    Raises:
        RunError: the file cannot be written.
    """
    errors: list[float] = []
    origin = 0
    with TraceWriter(path, plan.workers, plan.own_microbatches, plan.placement, max(plan.mesh.replicas)) as writer:
        for (replica, worker), found in zip(seats(plan), traces, strict=True):
            origin = origin if worker or replica else found.before.at
            spans, causes = found.spans, list(found.spans.table)
            writer.add(
                worker,
                [KINDS[kind] for kind in spans.kinds],
                [
                    span_name(KINDS[kind], causes[cause], minibatch, microbatch)
                    for kind, cause, minibatch, microbatch in zip(
                        spans.kinds, spans.causes, spans.minibatches, spans.microbatches, strict=True
                    )
                ],
                spans.minibatches,
                spans.microbatches,
                _since(origin, spans.begins, found),
                _since(origin, spans.ends, found),
                replica,
            )
            errors.append(max(found.before.error, found.after.error) / 1e3)
        writer.close(
            {
                "fxpipe": fxpipe.__version__,
                "build": plan.digest,
                "schedule": recipe.schedule.name,
                "policy": str(recipe.policy),
                "workers": plan.workers,
                "seconds": seconds,
                "clock_error_us": errors,
            }
        )


def seats(plan: Plan) -> list[tuple[int, int]]:
    """Each replica and worker of a run, in the order in which a trace has them."""
    counts = [plan.replicas_of(worker) for worker in range(plan.workers)]
    return [(replica, worker) for replica in range(max(counts)) for worker, own in enumerate(counts) if replica < own]


def _collected(plan: Plan, here: Mapping[tuple[int, int], WorkerTrace]) -> Iterator[WorkerTrace]:
    """What each of the `seats` recorded, on process 0; received from other processes one at a time."""
    for replica, worker in seats(plan):
        box: list[Any] = [here.get((replica, worker))]
        if box[0] is None:
            with peers():
                dist.recv_object_list(box, plan.mesh.process_of(worker, replica))
        yield box[0]


def _since(origin: int, times: Iterable[int], trace: WorkerTrace) -> list[int]:
    return [max(aligned(time, trace.before, trace.after) - origin, 0) for time in times]


def compare_clocks(path: str | None) -> ClockOffset:
    """Compare this process's clock with worker 0's, if there is a trace: nothing else needs it."""
    if path is None or alone():
        return ClockOffset(perf_counter_ns(), 0, 0)
    with peers():
        return read_offset()


def recorded(
    executors: Iterable[Executor], before: ClockOffset, after: ClockOffset
) -> dict[tuple[int, int], WorkerTrace]:
    """What the workers here have recorded, by replica and worker."""
    return {(e.replica, e.worker): WorkerTrace(e.watch.spans, before, after) for e in executors}


def collect_trace(
    path: str, process: int, plan: Plan, recipe: Recipe, here: Mapping[tuple[int, int], WorkerTrace], seconds: float
) -> bool:
    """Send what was recorded to process 0, which receives it from all workers even if it cannot write it. On process 0,
    return whether the file was written; a failure is a warning, since the run's results are safe by then."""
    if process:
        with peers():
            for trace in here.values():
                dist.send_object_list([trace], 0)
        return False
    traces = _collected(plan, here)
    lost: FxpipeError | None = None
    try:
        write_trace(path, plan, recipe, seconds, traces)
    except PeerLost:
        raise
    except FxpipeError as error:
        lost = error
        warn(f"the trace is lost: {error.what}")
    for _ in traces:
        pass
    return lost is None
