"""How far another process's clock is from worker 0's, by exchanging the time.

Each machine's `perf_counter_ns` begins anywhere. A worker asks worker 0 for its time some times over; of the quickest
exchange it takes worker 0's answer to have been given in the middle. So it is wrong by half of that exchange's time at
most (Cristian, Probabilistic clock synchronization, 1989). Clocks also drift: what was found before and after a run
makes a straight line, where they differ by more than they may be wrong.
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
    """At the time `at` of the own clock, worker 0's was `offset` further, give or take `error`; nanoseconds."""

    at: int
    offset: int
    error: int


def read_offset(rank: int, workers: int, now: Callable[[], int] = perf_counter_ns) -> ClockOffset:
    """Compare all clocks with worker 0's: a call for every process of the default group, one after the other."""
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
    """A time of the own clock as worker 0's, by what was read before and after it.

    Readings that differ by no more than their errors say nothing of a drift: the surer one counts, and times keep their
    lengths.
    """
    if abs(after.offset - before.offset) <= before.error + after.error:
        return time + min(before, after, key=lambda reading: reading.error).offset
    apart = max(after.at - before.at, 1)
    return time + before.offset + (after.offset - before.offset) * (time - before.at) // apart
