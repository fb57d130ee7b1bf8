"""What workers receive along a chain of units if every value goes from one worker that reads it to the next."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fxpipe.planner.sums_over_runs import Floats, Places


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
