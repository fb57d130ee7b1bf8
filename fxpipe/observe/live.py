"""What the workers are doing right now, for the display and the loggers of worker 0."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from fxpipe.observe.pulse import PERIOD, Status


class WorkerState(NamedTuple):
    """How long a worker was busy and waited, as shares of the time since it was last read; and the microbatches
    it holds."""

    busy: float
    waiting: float
    in_flight: int


class Live:
    """Reads what the workers have done since the beginning, by rank, or nothing if that is not known, and turns it into
    shares of the time since it last did. An answer lasts for `period` seconds."""

    def __init__(self, read: Callable[[], list[Status]], noun: str = "worker", period: float = PERIOD) -> None:
        self.noun = noun
        self._read, self._period, self._last = read, period, 0.0
        self._before: list[Status] = []
        self._states: list[WorkerState] = []

    def look(self) -> list[WorkerState]:
        """By rank; empty if nothing is known."""
        now = perf_counter()
        if now - self._last >= self._period:
            self._last = now
            self._compare(self._read())
        return list(self._states) if any(status.now for status in self._before) else []

    def _compare(self, statuses: list[Status]) -> None:
        if len(self._before) != len(statuses):
            self._before = [Status(0, 0, 0, 0)] * len(statuses)
            self._states = [WorkerState(0.0, 0.0, 0)] * len(statuses)
        for worker, (before, status) in enumerate(zip(self._before, statuses, strict=True)):
            passed = status.now - before.now
            if passed <= 0:  # it has not reported since
                continue
            busy, waiting = (max(b - a, 0) / passed for a, b in zip(before[1:3], status[1:3], strict=True))
            self._states[worker] = WorkerState(min(busy, 1.0), min(waiting, 1.0), status.in_flight)
            self._before[worker] = status
