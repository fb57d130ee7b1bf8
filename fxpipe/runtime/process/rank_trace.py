"""One process's part in the trace of a distributed run: clocks compared, and spans sent to worker 0."""

from __future__ import annotations

from typing import Any

from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.process.run_summary import add_trace
from fxpipe.runtime.wires.clocks import ClockOffset, read_offset
from fxpipe.runtime.wires.collect_trace import WorkerTrace, receive_trace, send_trace, write_trace
from fxpipe.runtime.wires.group import peers


def compare_clocks(path: str | None, rank: int, workers: int) -> ClockOffset:
    """Compare this process's clock with worker 0's, if there is a trace, which alone needs it."""
    if path is None:
        return ClockOffset(0, 0, 0)
    with peers(rank):
        return read_offset(rank, workers)


def collect_trace(
    path: str, rank: int, plan: Plan, recipe: Recipe, own: WorkerTrace, summary: dict[str, Any] | None, seconds: float
) -> None:
    """Send what was recorded to worker 0, which receives it from all workers even if it cannot write it.

    Args:
        summary: of the run, on worker 0: it gets the trace's path.
        seconds: the run's.
    """
    if summary is None:
        with peers(rank):
            send_trace(own)
        return
    others = iter(range(1, plan.workers))

    def fetch(worker: int) -> WorkerTrace:
        if worker == 0:
            return own
        with peers(rank):
            return receive_trace(next(others))

    add_trace(summary, path, lambda: write_trace(path, plan, recipe, seconds, fetch))
    for worker in others:
        with peers(rank):
            receive_trace(worker)
