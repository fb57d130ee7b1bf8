"""Sends messages that are not urgent from threads, chunk by chunk, so that urgent ones can pass.

A chunk is sent once the last chunk has left (see `fxpipe.plan.urgency`). But gloo sends nothing before the receiver has
posted its receive, and the first message sent here may be the last one read there. So the first bytes of a message are
sent separately, and wait for the receiver without blocking other messages. The receiver posts all receives of a message
at once, so it is ready for the other chunks, and only these take turns. Messages of one channel follow each other,
since both ends keep the order of a channel; a channel has a thread while it has messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, Lock, Thread
from typing import Any

from torch import Tensor

from fxpipe.plan.urgency import CHUNK

OPENING = 8
"""Bytes of a message that are sent first, separately."""


def pieces(size: int) -> list[slice]:
    """The pieces in which a message of this many bytes is sent: its opening, then chunks; the same at both ends."""
    first = min(OPENING, size)
    return [slice(0, first), *(slice(at, min(at + CHUNK, size)) for at in range(first, size, CHUNK))]


@dataclass(eq=False)
class Queued:
    """A message in an outbox. `send` begins to send some bytes, and returns the work to wait for."""

    turn: int
    data: Tensor
    send: Callable[[Tensor], Any]
    place: tuple[int, int] = (0, 0)
    _left: Future[None] = field(default_factory=Future)

    def wait(self) -> None:
        """Wait until all of it has left. RuntimeError if the connection was lost."""
        self._left.result()

    def leave(self, turns: ChunkTurns) -> None:
        """Send it; `wait` raises an error of this."""
        try:
            opening, *chunks = pieces(len(self.data))
            self.send(self.data[opening]).wait()
            with turns.wanted(self.place):
                for chunk in chunks:
                    with turns.one(self.place):
                        self.send(self.data[chunk]).wait()
        except Exception as error:
            self._left.set_exception(error)
        else:
            self._left.set_result(None)


class ChunkTurns:
    """Decides which message may send a chunk: one at a time, the one with the lowest place first."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._places: set[tuple[int, int]] = set()
        self._busy = False

    @contextmanager
    def wanted(self, place: tuple[int, int]) -> Iterator[None]:
        """Inside, the caller has chunks to send; no two callers have the same place."""
        with self._changed:
            self._places.add(place)
        try:
            yield
        finally:
            with self._changed:
                self._places.remove(place)
                self._changed.notify_all()

    @contextmanager
    def one(self, place: tuple[int, int]) -> Iterator[None]:
        """Inside, the caller sends one chunk."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and min(self._places) == place)
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()


class Outbox:
    """All messages to one worker that wait for their turn."""

    def __init__(self) -> None:
        self._turns = ChunkTurns()
        self._numbers = count()
        self._lock = Lock()
        self._queues: dict[Any, deque[Queued]] = {}

    def put(self, channel: Any, message: Queued) -> None:
        """Send a message after those of its channel."""
        message.place = (message.turn, next(self._numbers))
        with self._lock:
            queue = self._queues.get(channel)
            if queue is not None:
                queue.append(message)
                return
            self._queues[channel] = deque([message])
        Thread(target=self._send, args=(channel,), name="fxpipe-outbox", daemon=True).start()

    def _send(self, channel: Any) -> None:
        queue = self._queues[channel]
        while True:
            queue[0].leave(self._turns)
            with self._lock:
                queue.popleft()
                if not queue:
                    del self._queues[channel]
                    return


class Pieces:
    """The receives of a message's pieces."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait until all have arrived. RuntimeError if the connection was lost."""
        for work in self._works:
            work.wait()
