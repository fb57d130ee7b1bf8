"""The one timer: how often something is measured, and a clock that waits until the device is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclass(frozen=True)
class Rounds:
    """How many rounds are measured: as many as the budget allows, within bounds.

    Attributes:
        budget: seconds for all measured rounds together.
        least, most: rounds, whatever the budget allows.
        long: if rounds take this many seconds or more on average, no more follow, even with fewer than `least`.
        warm: rounds before those that are measured.
    """

    budget: float = float("inf")
    least: int = 1
    most: int = 100
    long: float = float("inf")
    warm: int = 0

    @staticmethod
    def exactly(count: int, warm: int = 0) -> Rounds:
        """Exactly `count` rounds, however long they take."""
        return Rounds(least=count, most=count, warm=warm)

    def more(self, done: int, spent: float) -> bool:
        """Whether `done` measured rounds that took `spent` seconds are too few."""
        if done < self.least:
            return done == 0 or spent < done * self.long
        return done < self.most and spent < self.budget

    def run(self, clock: Clock = perf_counter) -> Iterator[bool]:
        """Whether the round that begins is measured: False while it warms up. Ends when enough are measured."""
        for _ in range(self.warm):
            yield False
        done, begin = 0, clock()
        while self.more(done, clock() - begin):
            yield True
            done += 1


def clock_of(device: str) -> Clock:
    """The clock for what runs on a device (`cpu`, `cuda`, `mps`): it waits until the device has finished its work."""
    return perf_counter if device == "cpu" else partial(_after, device.partition(":")[0])


def _after(kind: str) -> float:
    import torch

    if kind in ("cuda", "mps"):
        getattr(torch, kind).synchronize()
    return perf_counter()


def seconds_of(call: Callable[[], Any], clock: Clock) -> float:
    """How long one call takes; what it returns is freed afterwards."""
    begin = clock()
    result = call()
    seconds = clock() - begin
    del result
    return seconds


def quartile(times: Sequence[float]) -> float:
    """The lower quartile of times: neither the luckiest one nor one that other work of the machine has lengthened."""
    return sorted(times)[len(times) // 4]
