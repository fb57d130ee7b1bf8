"""What the workers are doing right now, for the display on worker 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.observe.pulse import Status


class WorkerState(NamedTuple):
    """How long a worker was busy and waited, as shares of the time since it was last read; and the microbatches
    it holds."""

    busy: float
    waiting: float
    in_flight: int


@dataclass(frozen=True)
class Board:
    """Knows what the workers are doing.

    Attributes:
        read: by rank; empty if nothing is known.
        noun: what it has numbers of: `worker`, or `rank` where processes have several.
    """

    read: Callable[[], list[Status]]
    noun: str = "worker"


class Looker:
    """Reads a board: turns its sums since the beginning into shares of the time since it was last read."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.noun = board.noun
        self._before: list[Status] = []
        self._states: list[WorkerState] = []

    def look(self) -> list[WorkerState]:
        """By rank; empty if nothing is known."""
        found = self._board.read()
        if len(self._before) != len(found):
            self._before = [Status(0, 0, 0, 0)] * len(found)
            self._states = [WorkerState(0.0, 0.0, 0)] * len(found)
        for worker, (before, status) in enumerate(zip(self._before, found, strict=True)):
            passed = status.now - before.now
            if passed <= 0:  # it has not reported since
                continue
            busy, waiting = (max(b - a, 0) / passed for a, b in zip(before[1:3], status[1:3], strict=True))
            self._states[worker] = WorkerState(min(busy, 1.0), min(waiting, 1.0), status.in_flight)
            self._before[worker] = status
        return list(self._states) if any(status.now for status in self._before) else []
