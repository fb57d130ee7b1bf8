"""`fxpipe run --trace`: every worker's spans, in worker 0's time, in one file.

Nothing is sent during training. At the end the workers send their columns one after the other to worker 0, which
writes each and frees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist

import fxpipe
from fxpipe.errors import FxpipeError, PeerLost
from fxpipe.messages import warn
from fxpipe.observe.trace import KINDS
from fxpipe.observe.trace.writer import TraceWriter
from fxpipe.observe.watch import Spans, span_name
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.wires.clocks import ClockOffset, aligned, read_offset
from fxpipe.runtime.wires.group import alone, peers
from fxpipe.runtime.worker.executor import Executor


@dataclass(frozen=True)
class WorkerTrace:
    """What one worker recorded.

    Attributes:
        spans: in its own time.
        before, after: the offset of worker 0's clock from its own, before and after training.
    """

    spans: Spans
    before: ClockOffset
    after: ClockOffset


def write_trace(path: str, plan: Plan, recipe: Recipe, seconds: float, traces: Iterable[WorkerTrace]) -> None:
    """Write the file, on worker 0.

    Time 0 is when worker 0 first read its clock, before any worker began to train.

    Args:
        seconds: what the run took.
        traces: what each of the `seats` recorded.

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
                dist.recv_object_list(box, plan.process_of(worker, replica))
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
    path: str,
    process: int,
    plan: Plan,
    recipe: Recipe,
    here: Mapping[tuple[int, int], WorkerTrace],
    seconds: float,
) -> bool:
    """Send what was recorded to process 0, which receives it from all workers even if it cannot write it.

    Args:
        here: of the workers here, by replica and worker.
        seconds: what training took.

    Returns:
        On process 0, whether the file was written; a failure is a warning, since the run's results are safe by then.

    Raises:
        PeerLost: another process is gone.
    """
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
