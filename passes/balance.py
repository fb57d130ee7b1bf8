"""Balanced contiguous cuts: simple and near-linear; one set of positions for forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

SLACK = 1.01  # how much worse than the best bottleneck a cut may be if less crosses it


def balanced(
    seconds: Sequence[float], crossing: Sequence[int], workers: int, forbidden: set[int]
) -> tuple[int, ...] | None:
    """Positions that cut the units into `workers` non-empty runs whose slowest is within 1% of the least possible.

    Among the positions that keep that bound, each cut takes the one that the fewest bytes cross.

    Args:
        seconds: time of every unit.
        crossing: bytes that would cross a cut before every unit.
        forbidden: positions where no cut may be.

    Returns:
        `workers - 1` increasing positions, or None where the forbidden positions leave too few.
    """
    count = len(seconds)
    allowed = [p for p in range(1, count) if p not in forbidden]
    if len(allowed) < workers - 1:
        return None
    prefix = [0.0]
    for s in seconds:
        prefix.append(prefix[-1] + s)
    # Every run between neighbouring allowed positions is one block.
    edges = [0, *allowed, count]
    low = max(prefix[b] - prefix[a] for a, b in pairwise(edges))
    high = prefix[-1]
    for _ in range(60):
        middle = (low + high) / 2
        if _greedy(prefix, edges, workers, middle) is None:
            low = middle
        else:
            high = middle
    return _cheapest(prefix, edges, crossing, workers, high * SLACK)


def _greedy(prefix: Sequence[float], edges: Sequence[int], workers: int, limit: float) -> list[int] | None:
    """The furthest cuts, as indices into `edges`, with no run over `limit`; None if more than `workers` runs."""
    cuts, start = [], 0
    for i in range(1, len(edges)):
        if prefix[edges[i]] - prefix[edges[start]] > limit:
            if i - 1 == start:
                return None
            start = i - 1
            cuts.append(start)
            if len(cuts) >= workers:
                return None
    return cuts


def _cheapest(
    prefix: Sequence[float], edges: Sequence[int], crossing: Sequence[int], workers: int, limit: float
) -> tuple[int, ...]:
    """Left to right, the least crossed position from which the rest still fits under `limit`."""
    last = len(edges) - 1
    # latest[j]: the smallest index from which the j runs behind it fit; earliest: what the runs before can reach.
    smallest = [last]
    for _ in range(workers - 1):
        index = smallest[-1]
        start = index
        while start > 0 and prefix[edges[index]] - prefix[edges[start - 1]] <= limit:
            start -= 1
        smallest.append(min(start, index - 1))
    chosen: list[int] = []
    at = 0
    for k in range(1, workers):
        lowest = max(at + 1, smallest[workers - k])
        highest = last - (workers - k)
        window = [i for i in range(lowest, highest + 1) if i == lowest or prefix[edges[i]] - prefix[edges[at]] <= limit]
        at = min(window, key=lambda i: (crossing[edges[i]], -i))
        chosen.append(edges[at])
    return tuple(chosen)
