"""Slow links, without slow links: a message is taken only when links of a given bandwidth and latency had brought it.

Each direction of a link carries one message at a time:

    starts = max(wire free, sent)        wire free = starts + bytes / bandwidth        arrives = wire free + latency

The sender knows all its messages in order, so it computes when each arrives, and says so in the message; the receiver
waits until then. The simulator's `Direction` is the same rule.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns, sleep

from fxpipe.planner.links import Links
from fxpipe.planner.throttle import read_throttle
from fxpipe.runtime.wires.clocks import read_offset
from fxpipe.runtime.wires.group import peers


class Meter:
    """All links of the workers in this process, with one clock.

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
        self._free: dict[tuple[int, int], int] = {}  # by direction, when the wire is

    def send(self, source: int, to: int, size: int) -> int:
        """A message of `size` bytes is sent now; returns when it arrives, in nanoseconds of worker 0's clock."""
        occupies = round(self._links.seconds(source, to, size) * 1e9)
        free = max(self._free.get((source, to), 0), self._now() + self._offset) + occupies
        self._free[source, to] = free
        return free + round(self._links.latency_of(source, to) * 1e9)

    def is_due(self, arrives: int) -> bool:
        """Whether it is that time of worker 0's clock."""
        return self._now() + self._offset >= arrives

    def hold(self, arrives: int) -> None:
        """Wait until that time of worker 0's clock."""
        while (left := arrives - self._now() - self._offset) > 0:
            self._rest(left / 1e9)


def meter_of_process(throttle: str | None, rank: int, workers: int) -> Meter | None:
    """The meter of one process of a group whose run has this `--throttle`; all of them call it.

    Raises:
        ProfileError: as `read_throttle`.
    """
    links = read_throttle(throttle, workers)
    if links is None:
        return None
    with peers(rank):
        return Meter(links, read_offset(rank, workers).offset)
