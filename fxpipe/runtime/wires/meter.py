"""Slow links, without slow links: a message is taken only when links of a given bandwidth and latency had brought it.

Each direction of a link carries one message at a time:

    starts = max(wire free, sent)        wire free = starts + bytes / bandwidth        arrives = wire free + latency

The sender knows all its messages in order, so it computes when each arrives, and says so in the message; the receiver
waits until then. Of a message that waits its turn (`fxpipe.plan.urgency`), each chunk is such a message, which starts
when the wire is free and nothing urgent has been sent; when it arrives is known once its last chunk has started. The
simulator's `Direction` is the same rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter_ns, sleep

from fxpipe.plan.urgency import CHUNK, SAVED, WEIGHTS
from fxpipe.planner.links import Links
from fxpipe.planner.throttle import read_throttle
from fxpipe.runtime.wires.clocks import read_offset
from fxpipe.runtime.wires.group import peers


@dataclass(slots=True, eq=False)
class Letter:
    """A message that waits its turn.

    Attributes:
        left: its bytes that have not started.
        arrives: as `Meter.send` returns it; None before it is known.
    """

    source: int
    to: int
    left: int
    arrives: int | None = None


@dataclass(slots=True)
class _Wire:
    """One direction of a link: when it is free, and what waits its turn, by turn."""

    free: int = 0
    waiting: dict[int, deque[Letter]] = field(default_factory=lambda: {SAVED: deque(), WEIGHTS: deque()})


class Meter:
    """All links of this process, with one clock; several threads may use it. Its ends are processes: within one,
    messages take no time.

    Args:
        offset: nanoseconds that worker 0's clock is ahead of this process's (see `clocks`).
        now: the time in nanoseconds.
        rest: waits for so many seconds.
    """

    def __init__(
        self,
        links: Links,
        offset: int = 0,
        now: Callable[[], int] = perf_counter_ns,
        rest: Callable[[float], None] = sleep,
    ) -> None:
        self._links, self._offset, self._now, self._rest = links, offset, now, rest
        self._wires: dict[tuple[int, int], _Wire] = {}
        self._lock = Lock()

    def send(self, source: int, to: int, size: int) -> int:
        """A message of `size` bytes is sent now; returns when it arrives, in nanoseconds of worker 0's clock."""
        return self.send_all(source, {to: size})[0]

    def send_all(self, source: int, sizes: Mapping[int, int], sent: int = 0) -> list[int]:
        """A message is sent to each target, one after the other; returns when each arrives.

        Args:
            sizes: the bytes of each, by its target.
            sent: when, if that is later than now.
        """
        arrive = []
        with self._lock:
            for to, size in sizes.items():
                wire, now = self._carried(source, to)
                wire.free = sent = max(wire.free, now, sent) + self._occupies(source, to, size)
                arrive.append(sent + self._latency(source, to))
        return arrive

    def put(self, source: int, to: int, size: int, turn: int) -> Letter:
        """A message of `size` bytes is sent now, and waits its turn."""
        with self._lock:
            wire, now = self._carried(source, to)
            wire.free = max(wire.free, now)
            letter = Letter(source, to, size)
            wire.waiting[turn].append(letter)
            return letter

    def expected(self, letter: Letter) -> int:
        """When a message that waits its turn arrives if nothing else is sent; sure once its `arrives` is known."""
        return self._foreseen(letter)[1]

    def settle(self, letter: Letter) -> int:
        """Wait until it is known when a message arrives, which is when its last chunk has started."""
        while letter.arrives is None:
            self.hold(self._foreseen(letter)[0] + 1)
        return letter.arrives

    def is_due(self, arrives: int) -> bool:
        """Whether it is that time of worker 0's clock."""
        return self._now() + self._offset >= arrives

    def hold(self, arrives: int) -> None:
        """Wait until that time of worker 0's clock."""
        while (left := arrives - self._now() - self._offset) > 0:
            self._rest(left / 1e9)

    def _foreseen(self, letter: Letter) -> tuple[int, int]:
        """When the last chunk of a message starts, and when the message arrives, if nothing else is sent."""
        source, to = letter.source, letter.to
        with self._lock:
            wire, now = self._carried(source, to)
            if letter.arrives is not None:
                return now, letter.arrives
            ends = wire.free
            for each in (each for queue in wire.waiting.values() for each in queue):
                whole, last = divmod(max(each.left - 1, 0), CHUNK)
                starts = ends + whole * self._occupies(source, to, CHUNK)
                ends = starts + self._occupies(source, to, min(each.left, last + 1))
                if each is letter:
                    return starts, ends + self._latency(source, to)
        raise AssertionError("a message waits until its last chunk has started")

    def _carried(self, source: int, to: int) -> tuple[_Wire, int]:
        """A wire that has carried all chunks that start before now, and now, by worker 0's clock."""
        wire, now = self._wires.setdefault((source, to), _Wire()), self._now() + self._offset
        while wire.free < now and (queue := next((queue for queue in wire.waiting.values() if queue), None)):
            letter = queue[0]
            size = min(letter.left, CHUNK)
            wire.free += self._occupies(source, to, size)
            letter.left -= size
            if not letter.left:
                letter.arrives = wire.free + self._latency(source, to)
                queue.popleft()
        return wire, now

    def _occupies(self, source: int, to: int, size: int) -> int:
        return round(self._links.seconds(source, to, size) * 1e9)

    def _latency(self, source: int, to: int) -> int:
        return round(self._links.latency_of(source, to) * 1e9)


def meter_of_process(throttle: str | None, rank: int, ranks: int) -> Meter | None:
    """The meter of one process of a group whose run has this `--throttle`; all of them call it.

    Raises:
        ProfileError: as `read_throttle`.
    """
    links = read_throttle(throttle, ranks)
    if links is None:
        return None
    with peers(rank):
        return Meter(links, read_offset(rank, ranks).offset)
