"""How fast the links of a run are, from the times of its own messages (see `fxpipe.runtime.wires.message_times`).

    sent         │m1 │m2
    on the link  ██████████░░░░░░░░░     m2 occupies it from where m1 came, since it was sent before
    came                  │m1      │m2

Messages that no receiver waits for do not slow the run down. Their bytes count with those of the next awaited message,
but no time: so a link is never taken to be slower than it is. A longer latency counts as a lower bandwidth. Imports no
torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from fxpipe.planner.links import Links, matrix
from fxpipe.runtime.wires.message_times import SECOND

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
        extra, found = {way: self._least_extra(way) for way in self._sent}, {}
        for way, sent in self._sent.items():
            # Clocks drift: if messages seem faster than the link, those of the other direction seem as much slower.
            paces = self._paces(way, max(-extra[way], min(0.0, extra.get(way[::-1], 0.0))))
            if len(paces) >= SECONDS:
                load = (sent[-1].total - sent[0].total) * SECOND / (sent[-1].at - sent[0].at)
                found[way] = Measured(median(paces), load)
        return found

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
    """Links with what was measured.

    Args:
        links: as they were known last.
        first: as the build's compile knew them; none becomes faster.

    Returns:
        The links, and the greatest share of a second for which the messages of a direction take longer than known.
    """
    rates = [[links.bandwidth_of(a, b) for b in range(ranks)] for a in range(ranks)]
    changed: list[float] = []
    for (a, b), found in measured.items():
        rate = min(1 / max(found.pace, 1e-15), first.bandwidth_of(a, b))
        longer = found.load * (1 / rate - 1 / rates[a][b])
        if abs(longer) >= LEAST:
            rates[a][b] = rate
            changed.append(longer)
    return Links(matrix(rates), links.latency, links.copy) if changed else links, max([0.0, *changed])
