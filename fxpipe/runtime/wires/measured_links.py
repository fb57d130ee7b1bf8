"""How fast the links of a run are, from the times of its own messages. Each process notes when
its messages leave and arrive; the launcher, or process 0, compares what both ends have noted.

    sent         │m1 │m2
    on the link  ██████████░░░░░░░░░     m2 occupies it from where m1 came, since it was sent before
    came                  │m1      │m2

Both ends number the messages of a tag alike. A receiver knows when a message came only if it waited for it. Messages
that no receiver waits for do not slow the run down. Their bytes count with those of the next awaited message, but no
time: so a link is never taken to be slower than it is. A longer latency counts as a lower bandwidth. Imports no torch.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

from fxpipe.planner.links import Links, matrix

SECOND = 10**9

NOTED_A_SECOND = 50
"""How many messages of a second are noted in each direction: the first ones, so both ends note the same."""

AWAITED = 100_000
"""Nanoseconds; a receiver that has waited for less has found the message there."""


class MessageTimes:
    """The times of one process's messages, in nanoseconds of worker 0's clock. Worker 0's clock is so much ahead of
    this process's."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._seconds: dict[tuple[str, int], tuple[int, int]] = {}  # the last one, and what is noted of it
        self._rows: dict[str, list[tuple[int, ...]]] = {"sent": [], "came": []}

    def sent(self, to: int, tag: int, size: int) -> None:
        """A message of `size` bytes to another process begins to leave."""
        self._counts["bytes", to] += size
        total, number = self._counts["bytes", to], self._number("sent", to, tag)
        self._note("sent", to, perf_counter_ns() + self._ahead, tag, number, size, total)

    def expected(self, source: int, tag: int) -> Callable[[int, int], None]:
        """A receive was posted; the result takes the times from and until which the receiver waited for it."""
        number, posted = self._number("came", source, tag), perf_counter_ns() + self._ahead

        def came(begin: int, end: int) -> None:
            if end - begin > AWAITED:
                self._note("came", source, end + self._ahead, tag, number, posted)

        return came

    def put(self, write: Callable[[str], None]) -> None:
        """Write what was noted since the last call, as JSON: rows of the other process, the time, tag, number, and then
        of what was `sent` its bytes, and all bytes so far; of what `came`, when the receive was posted."""
        rows, self._rows = self._rows, {"sent": [], "came": []}
        with suppress(OSError):
            write(json.dumps(rows))

    def _number(self, *of: Any) -> int:
        self._counts[of] += 1
        return self._counts[of]

    def _note(self, kind: str, other: int, time: int, *more: int) -> None:
        second, count = self._seconds.get((kind, other), (0, 0))
        count = count + 1 if second == time // SECOND else 1
        self._seconds[kind, other] = time // SECOND, count
        if count <= NOTED_A_SECOND:
            self._rows[kind].append((other, time, *more))


SMALL = 4 << 10
"""Bytes; the time of smaller messages says nothing of the bandwidth."""

SECONDS = 3
"""The fewest seconds with awaited messages that measure a direction; of their figures, the median."""

LEAST = 0.1
"""A figure replaces the known one if by it messages take so many seconds more, or less, of a second."""

Way = tuple[int, int]


class Measured(NamedTuple):
    """One direction: seconds a byte, and bytes a second that it carries."""

    pace: float
    load: float


class _SentMessage(NamedTuple):
    at: int
    tag: int
    number: int
    size: int
    total: int


class MeasuredLinks:
    """Measures the links between the processes of a run. No message is faster than these, as the build's compile knew
    them."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._texts: dict[int, str] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all messages."""
        self._sent: defaultdict[Way, list[_SentMessage]] = defaultdict(list)
        self._came: defaultdict[Way, dict[tuple[int, int], tuple[int, int]]] = defaultdict(dict)

    def add(self, rank: int, text: str | None) -> None:
        """What a process has noted; the same text twice counts once."""
        if text is None or text == self._texts.get(rank):
            return
        self._texts[rank] = text
        rows = json.loads(text)
        for to, *sent in rows["sent"]:
            self._sent[rank, to].append(_SentMessage(*sent))
        for source, at, tag, number, posted in rows["came"]:
            self._came[source, rank][tag, number] = at, posted

    def measured(self) -> dict[Way, Measured]:
        """What is known of each direction that was waited for."""
        extra, directions = {way: self._least_extra(way) for way in self._sent}, {}
        for way, sent in self._sent.items():
            # Clocks drift: if messages seem faster than the link, those of the other direction seem as much slower.
            paces = self._paces(way, max(-extra[way], min(0.0, extra.get(way[::-1], 0.0))))
            if len(paces) >= SECONDS:
                load = (sent[-1].total - sent[0].total) * SECOND / (sent[-1].at - sent[0].at)
                directions[way] = Measured(median(paces), load)
        return directions

    def _least_extra(self, way: Way) -> float:
        """By how many nanoseconds more than the link needs all awaited messages came after they were sent."""
        latency, bandwidth, came = self._links.latency_of(*way), self._links.bandwidth_of(*way), self._came[way]
        both = [(one, came[one.tag, one.number][0]) for one in self._sent[way] if (one.tag, one.number) in came]
        return min((at - one.at - SECOND * (latency + one.size / bandwidth) for one, at in both), default=0.0)

    def _paces(self, way: Way, shift: float) -> list[float]:
        """Seconds a byte, in each second; messages were sent so many nanoseconds earlier."""
        latency = SECOND * self._links.latency_of(*way)
        taken: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        last: float | None = None
        size = total = 0
        for one in self._sent[way]:
            if one.total - one.size != total:  # those between were not noted
                last, size = None, 0
            size, total = size + one.size, one.total
            if (one.tag, one.number) not in self._came[way]:
                continue
            at, posted = self._came[way][one.tag, one.number]
            if last is not None and size > SMALL:
                # gloo sends when it knows that the receive is posted
                begin = max(last, one.at - shift + latency, posted + 2 * latency)
                of_second = taken[at // SECOND]
                of_second[0] += max(at - begin, 0.0)
                of_second[1] += size
            last, size = max(at, last or at), 0
        return [time / SECOND / size for time, size in taken.values()]


def replaced(links: Links, first: Links, ranks: int, measured: Mapping[Way, Measured]) -> tuple[Links, float]:
    """Links, as they were known last, with what was measured; none becomes faster than the compile of the build knew
    it, `first`. And the greatest share of a second for which the messages of a direction take longer than known."""
    rates = [[links.bandwidth_of(a, b) for b in range(ranks)] for a in range(ranks)]
    changed: list[float] = []
    for (a, b), found in measured.items():
        rate = min(1 / max(found.pace, 1e-15), first.bandwidth_of(a, b))
        longer = found.load * (1 / rate - 1 / rates[a][b])
        if abs(longer) >= LEAST:
            rates[a][b] = rate
            changed.append(longer)
    return Links(matrix(rates), links.latency, links.copy) if changed else links, max([0.0, *changed])
