"""How fast the links of a run are, from the times of its own messages (see `fxpipe.runtime.wires.message_times`).

    sent         │m1 │m2
    on the link  ██████████░░░░░░░░░     m2 occupies it from where m1 came, since it was sent before
    came                  │m1      │m2

Messages that no receiver waits for do not slow the run down. Their bytes count with those of the next awaited message,
but no time: so a link is never taken to be slower than it is. As in `fxpipe doctor --links`, small messages measure the
latency, and others the bandwidth. Imports no torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

from fxpipe.planner.links import Links, matrix
from fxpipe.runtime.wires.message_times import SECOND

SMALL = 4 << 10
"""Bytes of the largest small message."""

SECONDS = 3
"""The fewest seconds with awaited messages that measure a direction; of their figures, the median."""

AWAITED = 0.25
"""The least share of small messages that measures the latency: if only few are awaited, something else delayed them."""

LEAST = 0.05
"""A figure replaces the known one if by it messages take so many seconds more, or less, of a second."""

Way = tuple[int, int]


class Measured(NamedTuple):
    """One direction.

    Attributes:
        pace: seconds a byte; None if no messages show it.
        latency: seconds.
        load, often: bytes and messages of a second.
    """

    pace: float | None
    latency: float
    load: float
    often: float


class _Sent(NamedTuple):
    at: int
    tag: int
    number: int
    size: int
    total: int
    nth: int


class _Awaited(NamedTuple):
    """When a message was sent, its receive was posted, and it came; when the last awaited one before it came; and the
    bytes since then. Nanoseconds of worker 0's clock."""

    sent: float
    posted: int
    came: int
    last: int
    size: int


class LinkTimes:
    """Measures the links between the processes of a run.

    Args:
        links: between processes, as the build's compile knew them; no message is faster.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._texts: dict[int, str] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all messages."""
        self._sent: defaultdict[Way, list[_Sent]] = defaultdict(list)
        self._came: defaultdict[Way, dict[tuple[int, int], tuple[int, int]]] = defaultdict(dict)

    def add(self, rank: int, text: str | None) -> None:
        """What a process has noted; the same text twice counts once."""
        if text is None or text == self._texts.get(rank):
            return
        self._texts[rank] = text
        rows = json.loads(text)
        for to, *sent in rows["sent"]:
            self._sent[rank, to].append(_Sent(*sent))
        for source, at, tag, number, posted in rows["came"]:
            self._came[source, rank][tag, number] = at, posted

    def measured(self) -> dict[Way, Measured]:
        """What is known of each direction that was waited for."""
        extra = {way: least for way in self._sent if (least := self._least_extra(way)) is not None}
        awaited, latencies, found = dict[Way, list[_Awaited]](), dict[Way, float](), dict[Way, Measured]()
        for way in extra:
            # Clocks drift: if messages seem faster than the link, those of the other direction seem as much slower.
            shift = max(-extra[way], min(0.0, extra.get(way[::-1], 0.0)))
            awaited[way] = list(self._awaited(way, shift))
            if (latency := self._latency(way, awaited[way])) is not None:
                latencies[way] = latency
        for way, messages in awaited.items():
            latency = latencies.get(way, latencies.get(way[::-1], self._links.latency_of(*way)))
            pace, first, last = _pace(messages, SECOND * latency), self._sent[way][0], self._sent[way][-1]
            if last.at > first.at and (pace is not None or way in latencies):
                rate = SECOND / (last.at - first.at)
                load, often = (last.total - first.total) * rate, (last.nth - first.nth) * rate
                found[way] = Measured(pace, latency, load, often)
        return found

    def _least_extra(self, way: Way) -> float | None:
        """By how many nanoseconds more than the link needs all awaited messages came after they were sent."""
        latency, bandwidth, came = self._links.latency_of(*way), self._links.bandwidth_of(*way), self._came[way]
        return min(
            (
                came[one.tag, one.number][0] - one.at - SECOND * (latency + one.size / bandwidth)
                for one in self._sent[way]
                if (one.tag, one.number) in came
            ),
            default=None,
        )

    def _awaited(self, way: Way, shift: float) -> Iterator[_Awaited]:
        """The messages that were waited for; all were sent so many nanoseconds earlier."""
        last: int | None = None
        size = nth = 0
        for one in self._sent[way]:
            if one.nth != nth + 1:  # those between were not noted
                last, size = None, 0
            size, nth = size + one.size, one.nth
            if (found := self._came[way].get((one.tag, one.number))) is None:
                continue
            came, posted = found
            if last is not None:
                yield _Awaited(one.at - shift, posted, came, last, size)
            last, size = max(came, last or came), 0

    def _latency(self, way: Way, messages: list[_Awaited]) -> float | None:
        """Seconds, by small messages that found the link free."""
        known = self._links.latency_of(*way)
        free = [each for each in messages if each.size <= SMALL and each.last <= each.sent]
        taken = [each.came - max(each.sent, each.posted + SECOND * known) for each in free]
        few = len(taken) < max(SECONDS, AWAITED * sum(each.size <= SMALL for each in self._sent[way]))
        return None if few else max(median(taken) / SECOND, known)


def _pace(messages: list[_Awaited], latency: float) -> float | None:
    """Seconds a byte, by messages that are not small."""
    taken: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in messages:
        if each.size > SMALL:
            # gloo sends when it knows that the receive is posted
            begin = max(each.last, each.sent + latency, each.posted + 2 * latency)
            of_second = taken[each.came // SECOND]
            of_second[0] += max(each.came - begin, 0.0)
            of_second[1] += each.size
    paces = [time / SECOND / size for time, size in taken.values()]
    return median(paces) if len(paces) >= SECONDS else None


def replaced(links: Links, first: Links, ranks: int, measured: Mapping[Way, Measured]) -> tuple[Links, float]:
    """Links with what was measured.

    Args:
        links: as the run knows them.
        first: as the build's compile knew them; none becomes faster.

    Returns:
        The links, and the greatest share of a second for which the messages of a direction take longer than known.
    """
    figures, most = {(a, b): links.of(a, b) for a in range(ranks) for b in range(ranks)}, 0.0
    for way, found in measured.items():
        known, latency = figures[way]
        rate = known if found.pace is None else min(1 / max(found.pace, 1e-15), first.bandwidth_of(*way))
        longer = found.load * (1 / rate - 1 / known) + found.often * (found.latency - latency)
        if abs(longer) >= LEAST:
            figures[way], most = (rate, found.latency), max(most, longer)
            rates, latencies = ([[figures[a, b][k] for b in range(ranks)] for a in range(ranks)] for k in (0, 1))
            links = Links(matrix(rates), matrix(latencies), links.copy)
    return links, most
