"""Calls that all processes of a run make together: an object from each, one to all, an error of one for all, a
comparison of clocks.

They go over the connections of the group and not over the board: a connection breaks when its other end is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxpipe.errors import FxpipeError, PeerLost, RunError
from fxpipe.runtime.wires.group import alone, peers

T = TypeVar("T")


def gathered(own: T) -> list[T]:
    """Gather an object from each process, by rank; the same list on all of them."""
    if alone():
        return [own]
    with peers():
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, own)
    return objects


def of_worker_0(value: T) -> T:
    """Broadcast worker 0's value to all processes."""
    if alone():
        return value
    box: list[Any] = [value]
    with peers():
        dist.broadcast_object_list(box, 0)
    of_0: T = box[0]
    return of_0


def barrier() -> None:
    """Wait until all processes have called this."""
    if not alone():
        with peers():
            dist.barrier()


@contextmanager
def agreeing() -> Iterator[None]:
    """After the block, all raise an error that one of them has raised inside: their own, or else another worker's."""
    error: FxpipeError | None = None
    try:
        yield
    except PeerLost:
        raise
    except FxpipeError as met:
        error = met
    errors = gathered(error)
    if error is not None:
        raise error
    for worker, other in enumerate(errors):
        if other is not None:
            raise RunError(f"on worker {worker}: {other.what}", where=other.where, hint=other.hint, page=other.page)


_EXCHANGES = 16


@dataclass(frozen=True)
class ClockOffset:
    """At time `at` of this process's clock, worker 0's clock was `offset` ahead, plus or minus `error`; nanoseconds.

    The zero of `perf_counter_ns` differs between machines. A worker asks worker 0 for its time several times, and
    assumes that worker 0 answered in the middle of the quickest exchange. So the offset is wrong by at most half the
    time of that exchange (Cristian, Probabilistic clock synchronization, 1989). Clocks also drift: if the offsets
    before and after a run differ by more than their errors, linear interpolation between them corrects the times.
    """

    at: int
    offset: int
    error: int


def read_offset(now: Callable[[], int] = perf_counter_ns) -> ClockOffset:
    """Compare this clock with worker 0's; every process of the default group calls it, and they take turns."""
    time = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        for worker in range(1, dist.get_world_size()):
            for _ in range(_EXCHANGES):
                dist.recv(time, worker)
                time[0] = now()
                dist.send(time, worker)
        return ClockOffset(now(), 0, 0)
    readings = []
    for _ in range(_EXCHANGES):
        sent = now()
        dist.send(time, 0)
        dist.recv(time, 0)
        answered = now()
        middle = (sent + answered) // 2
        readings.append(ClockOffset(middle, int(time[0]) - middle, (answered - sent + 1) // 2))
    return min(readings, key=lambda reading: reading.error)


def aligned(time: int, before: ClockOffset, after: ClockOffset) -> int:
    """Convert a time of this process's clock to worker 0's clock, by the readings before and after training.

    Readings that differ by no more than their errors show no drift: then the more precise one is used, and durations do
    not change.
    """
    if abs(after.offset - before.offset) <= before.error + after.error:
        return time + min(before, after, key=lambda reading: reading.error).offset
    apart = max(after.at - before.at, 1)
    return time + before.offset + (after.offset - before.offset) * (time - before.at) // apart
