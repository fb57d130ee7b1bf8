"""Sums and maxima over runs of units, for many runs at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Span = tuple[Places, Places]
"""[first, end), with an element for each candidate; empty if end ≤ first."""


def prefix(values: Sequence[float]) -> Floats:
    """Sums over the first 0, 1, … values."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])


def total(sums: Floats, span: Span) -> Floats:
    """The sum over each span, from `prefix`; 0 for an empty one."""
    return sums[np.maximum(span[1], span[0])] - sums[span[0]]


def both(one: Span, other: Span) -> Span:
    """The part that two spans share."""
    return np.maximum(one[0], other[0]), np.minimum(one[1], other[1])


def front(span: Span, limit: Places) -> Span:
    """The part of a span before a position."""
    return span[0], np.minimum(span[1], limit)


def back(span: Span, limit: Places) -> Span:
    """The part of a span from a position on."""
    return np.maximum(span[0], limit), span[1]


def hull(one: Span, other: Span) -> Span:
    """From the first unit of both to the last; an empty span does not count."""
    empty, empty_other = one[1] <= one[0], other[1] <= other[0]
    first = np.where(empty, other[0], np.where(empty_other, one[0], np.minimum(one[0], other[0])))
    end = np.where(empty, other[1], np.where(empty_other, one[1], np.maximum(one[1], other[1])))
    return first, end


class Trim:
    """Shortens spans to the range from the first to the last unit of a kind.

    Args:
        kind: which units are of the kind.
    """

    def __init__(self, kind: Sequence[bool]) -> None:
        self.following, self._ended = _neighbours(kind)

    def __call__(self, span: Span) -> Span:
        """From the first unit of the kind to the last; empty if there is none."""
        return self.following[span[0]], self._ended[np.maximum(span[1], 0)]


def _neighbours(owns: Sequence[bool]) -> tuple[Places, Places]:
    """For every position, the first unit of a kind from there on, and the end of the last one before it."""
    count = len(owns)
    following, ended = np.full(count + 1, count), np.zeros(count + 1, dtype=np.int64)
    for p in range(count - 1, -1, -1):
        following[p] = p if owns[p] else following[p + 1]
    for p in range(count):
        ended[p + 1] = p + 1 if owns[p] else ended[p]
    return following, ended


class Maximum:
    """The largest of a run of values, from maxima over runs of 1, 2, 4, … (a sparse table)."""

    def __init__(self, values: Sequence[float] | Floats) -> None:
        level = np.asarray(values, dtype=np.float64)
        self._levels = [level]
        width = 1
        while 2 * width <= len(level):
            longer = self._levels[-1].copy()
            longer[:-width] = np.maximum(longer[:-width], self._levels[-1][width:])
            self._levels.append(longer)
            width *= 2
        self._stack = np.stack(self._levels)

    def over(self, span: Span) -> Floats:
        """The maximum over each span; 0 for an empty one."""
        first, end = span
        length = np.maximum(end - first, 1)
        depth = np.floor(np.log2(length)).astype(np.int64)
        last = len(self._levels[0]) - 1
        start = np.minimum(first, last)
        other = np.clip(end - (1 << depth), 0, last)
        largest = np.maximum(self._stack[depth, start], self._stack[depth, other])
        return np.where(end > first, largest, 0.0)


class Crossing:
    """The bytes that a worker with units [p, q) of a chain receives: every value from outside that they read, once.

    A value is a row of hops, from its producer to its first reader, on to its second, and so on. It arrives at [p, q)
    if its first reader from p on is before q: over the one hop lo → hi with lo < p ≤ hi < q.

    Args:
        units: how many units the chain has.
        values: (bytes, producer, readers after it) of every value; positions in the direction of the chain.
    """

    def __init__(self, units: int, values: Iterable[tuple[float, int, Iterable[int]]]) -> None:
        self.units = units
        merged: dict[tuple[int, int], float] = {}
        for size, producer, readers in values:
            before = producer
            for reader in sorted({r for r in readers if r > producer}):
                if size:
                    merged[before, reader] = merged.get((before, reader), 0.0) + size
                before = reader
        hops = sorted(merged.items(), key=lambda item: item[0][1])
        self._lo = np.array([lo for (lo, _), _ in hops], dtype=np.int64)
        self._hi = np.array([hi for (_, hi), _ in hops], dtype=np.int64)
        self._bytes = np.array([size for _, size in hops], dtype=np.float64)
        spans = self._hi - self._lo  # a hop is open at the positions lo+1 … hi
        owner = np.repeat(np.arange(len(hops)), spans)
        first = np.repeat(np.cumsum(spans) - spans, spans)
        place = np.arange(len(owner)) - first + np.repeat(self._lo + 1, spans)
        order = np.lexsort((owner, place))  # hops stay sorted by hi within one position
        self._open = owner[order]
        self._start = np.searchsorted(place[order], np.arange(units + 2))

    def total(self) -> Floats:
        """For every position p, the bytes that cross it: what [p, units) receives."""
        return np.array([self._bytes[self.open_at(p)].sum() for p in range(self.units + 1)])

    def open_at(self, position: int) -> Places:
        """The hops that cross a position, sorted by their end."""
        return self._open[self._start[position] : self._start[position + 1]]

    def ends(self, hops: Places) -> Places:
        """Where hops end."""
        return self._hi[hops]

    def starts(self, hops: Places) -> Places:
        """Where hops start."""
        return self._lo[hops]

    def table(self, begins: Places, ends: Places) -> Floats:
        """Bytes received by [p, q) for every p of `begins` (rows) and q of `ends` (columns); 0 where q ≤ p."""
        result = np.zeros((len(begins), len(ends)))
        for row, p in enumerate(begins):
            hops = self.open_at(int(p))
            if len(hops):
                sums = np.concatenate([[0.0], np.cumsum(self._bytes[hops])])
                result[row] = sums[np.searchsorted(self._hi[hops], ends, side="left")]
        return result
