"""One process's part in the trace of a distributed run: clocks compared, and spans sent to worker 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.process.run_summary import add_trace
from fxpipe.runtime.wires.clocks import ClockOffset, read_offset
from fxpipe.runtime.wires.collect_trace import WorkerTrace, receive_trace, seats, send_trace, write_trace
from fxpipe.runtime.wires.group import peers


def compare_clocks(path: str | None, rank: int, ranks: int) -> ClockOffset:
    """Compare this process's clock with worker 0's, if there is a trace, which alone needs it."""
    if path is None:
        return ClockOffset(0, 0, 0)
    with peers(rank):
        return read_offset(rank, ranks)


def collect_trace(
    path: str,
    process: int,
    plan: Plan,
    recipe: Recipe,
    own: Sequence[WorkerTrace],
    summary: dict[str, Any] | None,
    seconds: float,
) -> None:
    """Send what was recorded to rank 0, which receives it from all workers even if it cannot write it.

    Args:
        own: of the workers here.
        summary: of the run, on worker 0: it gets the trace's path.
        seconds: the run's.
    """
    if summary is None:
        with peers(process):
            for trace in own:
                send_trace(trace)
        return
    here = dict(zip(plan.hosted(0), own, strict=True))
    others = iter([(replica, worker) for replica, worker in seats(plan) if replica or worker not in here])

    def fetch(worker: int, replica: int) -> WorkerTrace:
        if not replica and worker in here:
            return here[worker]
        next(others)
        with peers(process):
            return receive_trace(plan.process_of(worker, replica))

    add_trace(summary, path, lambda: write_trace(path, plan, recipe, seconds, fetch))
    for replica, worker in others:
        with peers(process):
            receive_trace(plan.process_of(worker, replica))
