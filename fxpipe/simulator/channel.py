"""Messages between two workers: when each arrives, and which wait for their turn on the link.

`fxpipe.plan.urgency` decides which messages wait, and how.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, inf

from fxpipe.plan.urgency import CHUNK, SAVED, URGENT, WEIGHTS
from fxpipe.planner.links import Links


@dataclass(slots=True, eq=False)
class Waiting:
    """A message that waits for its turn.

    Attributes:
        left: its bytes that have not been carried yet.
        begins: when the first byte was carried; None before that.
    """

    channel: Channel
    number: int
    left: float
    begins: float | None = None

    @property
    def chunks(self) -> int:
        """How many chunks the rest has."""
        return max(1, ceil(self.left / CHUNK))


@dataclass(slots=True)
class Direction:
    """One direction of a link, and when it is free for the next message, in seconds.

    Before a send at a time, call `carry(time)`, so that it carries all that begins earlier.

    Attributes:
        waiting: how many messages wait for their turn.
    """

    free: float = 0.0
    waiting: int = 0
    _queues: dict[int, deque[Waiting]] = field(default_factory=lambda: {SAVED: deque(), WEIGHTS: deque()})

    def put(self, message: Waiting, time: float) -> None:
        """A message is sent at `time`, and waits for its turn."""
        self.free = max(self.free, time)
        self._queues[message.channel.turn].append(message)
        self.waiting += 1

    def carry(self, until: float) -> list[Waiting]:
        """Carry all chunks that begin before `until`; returns the messages that are then complete."""
        arrived: list[Waiting] = []
        while self.free < until and (message := self._first()) is not None:
            if self._carry(message, until):
                arrived.append(message)
        return arrived

    def carry_all(self, last: Waiting) -> list[Waiting]:
        """Carry the rest of a message, and what precedes it; no urgent message is sent before its last chunk begins."""
        arrived: list[Waiting] = []
        while last not in arrived and (message := self._first()) is not None:
            self._carry(message, inf)
            arrived.append(message)
        return arrived

    def expected(self) -> Iterator[tuple[float, Waiting]]:
        """When each waiting message would arrive if no other were sent."""
        time = self.free
        for queue in self._queues.values():
            for message in queue:
                begins = time if message.begins is None else message.begins
                time += message.channel.seconds(message.left)
                yield message.channel.arrives(begins, time), message

    def _first(self) -> Waiting | None:
        return next((queue[0] for queue in self._queues.values() if queue), None)

    def _carry(self, message: Waiting, until: float) -> bool:
        """Carry the chunks of the first message that begin before `until`, at least one; whether that completes it."""
        chunk, chunks = message.channel.seconds(CHUNK), message.chunks
        message.begins = self.free if message.begins is None else message.begins
        if self.free + (chunks - 1) * chunk >= until:
            chunks = min(chunks - 1, ceil((until - self.free) / chunk))
            self.free += chunks * chunk
            message.left -= float(chunks * CHUNK)
            return False
        self.free += message.channel.seconds(message.left)
        message.channel.ready[message.number] = message.channel.arrives(message.begins, self.free)
        self._queues[message.channel.turn].popleft()
        self.waiting -= 1
        return True


class Channel:
    """All messages of one `Message`, numbered by microbatch, or of one `WeightCopy`, numbered by version.

    Args:
        direction: shared with the other channels from `src` to `dst`.
        count: how many messages there are.
        turn: whether they are urgent or wait for their turn (see `fxpipe.plan.urgency`).

    Attributes:
        copy: seconds that the processor of each end is busy with one message.
        ready: by number, when a receiver that is idle has the message; None while that is unknown: it was not sent, or
            waits for its turn.
        copied: by number, whether the receiver has spent its `copy`.
        asleep: the number that the receiver waits for; −1 if it does not wait.
    """

    __slots__ = (
        *("_bandwidth", "_latency", "_occupies", "_travels"),
        *("asleep", "bytes", "copied", "copy", "direction", "dst", "ready", "src", "turn"),
    )

    def __init__(
        self, src: int, dst: int, size: float, links: Links, direction: Direction, count: int, turn: int = URGENT
    ) -> None:
        self.src = src
        self.dst = dst
        self.bytes = size
        self.turn = turn
        self.direction = direction
        self.copy = links.copy * size
        self.ready: list[float | None] = [None] * count
        self.copied = bytearray(count)
        self.asleep = -1
        self._bandwidth = links.bandwidth_of(src, dst)
        self._occupies = links.seconds(src, dst, size)
        self._latency = links.latency_of(src, dst)
        # Both ends copy while the link carries the message: it has arrived when both are done.
        self._travels = max(self._occupies, self.copy) + self._latency

    def send(self, number: int, time: float) -> None:
        """Send a message at `time`, or later when the direction is free."""
        start = max(time, self.direction.free)
        self.direction.free = start + self._occupies
        self.ready[number] = start + self._travels

    def wait(self, number: int, time: float) -> None:
        """Send a message at `time` that waits for its turn; it is `ready` once the direction has carried it."""
        self.direction.put(Waiting(self, number, self.bytes), time)

    def arrives(self, begins: float, ends: float) -> float:
        """When an idle receiver has a message that the direction carries from `begins` to `ends`."""
        return max(ends, begins + self.copy) + self._latency

    def seconds(self, size: float) -> float:
        """How long this many bytes occupy the direction."""
        return size / self._bandwidth
