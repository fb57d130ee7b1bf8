"""`fxpipe run --trace`: every worker's spans, in worker 0's time, in one file.

Nothing travels while the run trains. At its end the workers send their columns to worker 0 one after the other, which
writes each and frees it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

import fxpipe
from fxpipe.errors import FxpipeError, PeerLost
from fxpipe.messages import warn
from fxpipe.observe.trace import KINDS, Kind
from fxpipe.observe.trace.writer import TraceWriter
from fxpipe.observe.watch import Cause, Spans, Watch
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.wires.clocks import ClockOffset, aligned, read_offset
from fxpipe.runtime.wires.group import alone, peers
from fxpipe.runtime.worker.executor import Executor
from fxpipe.schedule.action import Action

_NUMBERS = ("kinds", "causes", "minibatches", "microbatches", "begins", "ends")


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

    @staticmethod
    def of(watch: Watch) -> WorkerTrace:
        """The trace of a worker whose clock is worker 0's."""
        return WorkerTrace(watch.spans, ClockOffset(watch.began, 0, 0), ClockOffset(watch.ended, 0, 0))


def write_trace(
    path: str, plan: Plan, recipe: Recipe, seconds: float, fetch: Callable[[int, int], WorkerTrace]
) -> None:
    """Write the file, on worker 0.

    Its time begins when worker 0 first read its clock: at that moment no worker had begun to train.

    Args:
        seconds: what the run took.
        fetch: gives what a worker's replica recorded; called for all workers in their order, of replica 0 first.

    Raises:
        RunError: the file cannot be written.
    """
    errors: list[float] = []
    origin = 0
    with TraceWriter(path, plan.workers, plan.own_microbatches, plan.placement, max(plan.mesh.replicas)) as writer:
        for replica, worker in seats(plan):
            found = fetch(worker, replica)
            origin = origin if worker or replica else found.before.at
            spans, causes = found.spans, list(found.spans.table)
            writer.add(
                worker,
                [KINDS[kind] for kind in spans.kinds],
                [
                    _name(KINDS[kind], causes[cause], minibatch, microbatch)
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


def send_trace(trace: WorkerTrace) -> None:
    """Send what this worker recorded to worker 0, which calls `receive_trace`."""
    spans = trace.spans
    head = {
        "causes": [None if cause is None else list(cause) for cause in spans.table],
        "before": [trace.before.at, trace.before.offset, trace.before.error],
        "after": [trace.after.at, trace.after.offset, trace.after.error],
    }
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([text.numel(), len(spans.kinds)]), 0)
    dist.send(text, 0)
    if spans.kinds:
        for name in _NUMBERS:
            column = getattr(spans, name)
            dist.send(torch.frombuffer(bytearray(column.tobytes()), dtype=torch.uint8), 0)


def receive_trace(rank: int) -> WorkerTrace:
    """What a rank sends with `send_trace`."""
    sizes = torch.empty(2, dtype=torch.int64)
    dist.recv(sizes, rank)
    head = json.loads(_bytes(int(sizes[0]), rank))
    spans = Spans()
    spans.table = {None if cause is None else Cause(*cause): i for i, cause in enumerate(head["causes"])}
    if count := int(sizes[1]):
        for name in _NUMBERS:
            column: array[int] = getattr(spans, name)
            column.frombytes(_bytes(count * column.itemsize, rank))
    return WorkerTrace(spans, ClockOffset(*head["before"]), ClockOffset(*head["after"]))


def _bytes(count: int, rank: int) -> bytes:
    data = torch.empty(count, dtype=torch.uint8)
    dist.recv(data, rank)
    return data.numpy().tobytes()


def _since(origin: int, times: Iterable[int], trace: WorkerTrace) -> list[int]:
    return [max(aligned(time, trace.before, trace.after) - origin, 0) for time in times]


def _name(kind: Kind, cause: Cause | None, minibatch: int, microbatch: int) -> str:
    if cause is not None and cause.what == "sum":
        return f"wait for the sum of {cause.name}"
    if cause is not None:
        joint = {"send": "send {} to worker {}", "receive": "receive {} from worker {}"}
        return joint.get(kind, "wait for {} from worker {}").format(cause.name, cause.worker)
    if kind == "F" or kind == "B" or kind == "W":
        return str(Action(kind, minibatch, microbatch))
    return f"update {minibatch}" if kind == "update" else kind


def compare_clocks(path: str | None, rank: int, ranks: int) -> ClockOffset:
    """Compare this process's clock with worker 0's, if there is a trace, which alone needs it."""
    if path is None:
        return ClockOffset(0, 0, 0)
    with peers(rank):
        return read_offset(rank, 1 if alone() else ranks)


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
        Whether the file is there, on process 0; what prevented it is said, since all else of a run is safe by then.

    Raises:
        PeerLost: another process is gone.
    """
    if process:
        with peers(process):
            for trace in here.values():
                send_trace(trace)
        return False
    others = iter([seat for seat in seats(plan) if seat not in here])

    def fetch(worker: int, replica: int) -> WorkerTrace:
        if (replica, worker) in here:
            return here[replica, worker]
        next(others)
        with peers(process):
            return receive_trace(plan.process_of(worker, replica))

    lost: FxpipeError | None = None
    try:
        write_trace(path, plan, recipe, seconds, fetch)
    except PeerLost:
        raise
    except FxpipeError as error:
        lost = error
        warn(f"the trace is lost: {error.what}")
    for replica, worker in others:
        with peers(process):
            receive_trace(plan.process_of(worker, replica))
    return lost is None
