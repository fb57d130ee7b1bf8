"""How far worker 0's clock is ahead of another process's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import torch
import torch.distributed as dist

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
    """Convert a time of this process's clock to worker 0's clock, by the readings before and after training.

    Readings that differ by no more than their errors show no drift: then the more precise one is used, and durations do
    not change.
    """
    if abs(after.offset - before.offset) <= before.error + after.error:
        return time + min(before, after, key=lambda reading: reading.error).offset
    apart = max(after.at - before.at, 1)
    return time + before.offset + (after.offset - before.offset) * (time - before.at) // apart
