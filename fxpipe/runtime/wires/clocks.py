"""How far another process's clock is from worker 0's, by exchanging the time.

The zero of `perf_counter_ns` differs from machine to machine. A worker asks worker 0 for its time several times, and
assumes that worker 0 answered in the middle of the quickest exchange. So the offset is wrong by at most half of that
exchange's time (Cristian, Probabilistic clock synchronization, 1989). Clocks also drift: if the offsets before and
after a run differ by more than their errors, a straight line between them corrects the times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import torch
import torch.distributed as dist

_EXCHANGES = 16


@dataclass(frozen=True)
class ClockOffset:
    """At the time `at` of this process's clock, worker 0's was `offset` ahead, give or take `error`; nanoseconds."""

    at: int
    offset: int
    error: int


def read_offset(rank: int, workers: int, now: Callable[[], int] = perf_counter_ns) -> ClockOffset:
    """Compare clocks with worker 0's, one process after the other; every process of the default group calls it."""
    time = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        for worker in range(1, workers):
            for _ in range(_EXCHANGES):
                dist.recv(time, worker)
                time[0] = now()
                dist.send(time, worker)
        return ClockOffset(now(), 0, 0)
    found = []
    for _ in range(_EXCHANGES):
        asked = now()
        dist.send(time, 0)
        dist.recv(time, 0)
        answered = now()
        middle = (asked + answered) // 2
        found.append(ClockOffset(middle, int(time[0]) - middle, (answered - asked + 1) // 2))
    return min(found, key=lambda reading: reading.error)


def aligned(time: int, before: ClockOffset, after: ClockOffset) -> int:
    """A time of this process's clock as a time of worker 0's, by the readings before and after training.

    Readings that differ by no more than their errors show no drift: the more precise one counts, and durations stay as
    they are.
    """
    if abs(after.offset - before.offset) <= before.error + after.error:
        return time + min(before, after, key=lambda reading: reading.error).offset
    apart = max(after.at - before.at, 1)
    return time + before.offset + (after.offset - before.offset) * (time - before.at) // apart
