"""What the workers are doing right now, for the display on worker 0."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from fxpipe.observe.watch import Status, Watch

PERIOD = 1.0
"""Seconds between two reports of a worker."""

_FORM = struct.Struct("<4q")


class WorkerState(NamedTuple):
    """How long a worker was busy and waited, as shares of the time since the last look; and the microbatches it
    holds."""

    busy: float
    waiting: float
    in_flight: int


class Board(Protocol):
    """Tells what the workers are doing."""

    def read(self) -> list[Status]:
        """By rank; empty if nothing is known."""


class Looker:
    """Looks at a board: turns its sums since the beginning into shares of the time since the last look."""

    def __init__(self, board: Board) -> None:
        self._board = board
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


class LocalBoard:
    """A board of workers in this process."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches

    def read(self) -> list[Status]:
        return [watch.status for watch in self._watches]


class StoreBoard:
    """A board of workers in separate processes: each writes once a second what it is doing into the process group's
    store.

    A thread writes it, so that long waits are seen, too.
    """

    def __init__(self, rank: int, workers: int, watch: Watch) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._keys = [f"fxpipe/status/{worker}" for worker in range(workers)]
        self._key = self._keys[rank]
        self._watch = watch
        self._over = threading.Event()
        self._say(Status(0, 0, 0, 0))
        self._thread = threading.Thread(target=self._keep_saying, daemon=True)

    def begin(self) -> None:
        """Begin to report; all workers must have made their boards by now."""
        self._thread.start()

    def end(self) -> None:
        """Stop reporting."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(PERIOD)

    def read(self) -> list[Status]:
        try:
            found = self._store.multi_get(self._keys)
        except RuntimeError:  # the store ends with the process that holds it
            return []
        return [Status(*_FORM.unpack(text)) for text in found]

    def _keep_saying(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                self._say(self._watch.status)
            except RuntimeError:
                return

    def _say(self, status: Status) -> None:
        self._store.set(self._key, _FORM.pack(*status))
