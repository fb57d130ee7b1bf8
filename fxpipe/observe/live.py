"""What the workers are doing right now, for the display on worker 0."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from fxpipe.observe.watch import Status, Watch

PERIOD = 1.0
"""Seconds between two words of a worker."""

_FORM = struct.Struct("<4q")


class WorkerState(NamedTuple):
    """Shares of the time since the last look in which a worker was busy and waited; microbatches it holds."""

    busy: float
    waiting: float
    in_flight: int


class Board(Protocol):
    """Tells how the workers stand."""

    def read(self) -> list[Status]:
        """By rank; empty where nothing is known."""


class Looker:
    """Looks at a board: its sums since the beginning as shares of what has passed since the last look."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._before: list[Status] = []
        self._states: list[WorkerState] = []

    def look(self) -> list[WorkerState]:
        """By rank; empty where nothing is known."""
        found = self._board.read()
        if len(self._before) != len(found):
            self._before = [Status(0, 0, 0, 0)] * len(found)
            self._states = [WorkerState(0.0, 0.0, 0)] * len(found)
        for worker, (before, status) in enumerate(zip(self._before, found, strict=True)):
            passed = status.now - before.now
            if passed <= 0:  # it has not said anything since
                continue
            busy, waiting = (max(b - a, 0) / passed for a, b in zip(before[1:3], status[1:3], strict=True))
            self._states[worker] = WorkerState(min(busy, 1.0), min(waiting, 1.0), status.in_flight)
            self._before[worker] = status
        return list(self._states) if any(status.now for status in self._before) else []


class LocalBoard:
    """All workers in this process."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches

    def read(self) -> list[Status]:
        return [watch.status for watch in self._watches]


class StoreBoard:
    """Workers in processes of their own: each says once a second how it stands, in the process group's store.

    A thread says it, so that a worker that waits long is seen to wait.
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
        """Begin to say; all workers must have made their boards by now."""
        self._thread.start()

    def end(self) -> None:
        """Say no more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(PERIOD)

    def read(self) -> list[Status]:
        try:
            found = self._store.multi_get(self._keys)
        except RuntimeError:  # the store goes with the process that holds it
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
