"""Some of a product for the quick tests, more of it for the slow ones."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def covering(*axes: Collection[Any], strength: int = 2) -> list[Any]:
    """Combinations of the axes' values, as parameters of a test; most of them are marked slow.

    The quick ones are as few as a greedy choice finds so that each value of an axis meets each of every other axis
    (`strength` 2), or so that each value is there (`strength` 1). With the slow ones, each value also meets every pair
    of others: faults that take more axes at once are rare (Kuhn, Wallace and Gallo, Software fault interactions, 2004).
    """
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    quick = _chosen(places, strength)
    slow = [i for i in _chosen(places, min(strength + 1, len(axes))) if i not in quick]
    values = list(itertools.product(*axes))
    marked = [(i, ()) for i in quick] + [(i, pytest.mark.slow) for i in slow]
    return [pytest.param(*values[i], marks=marks) for i, marks in sorted(marked, key=lambda pair: pair[0])]


def _chosen(places: Sequence[tuple[int, ...]], strength: int) -> list[int]:
    """Which places cover every combination of values of so many axes."""
    parts = [set(itertools.combinations(enumerate(place), strength)) for place in places]
    left, found = set().union(*parts), []
    while left:
        best = max(range(len(parts)), key=lambda i: len(parts[i] & left))
        found.append(best)
        left -= parts[best]
    return found


def a_few_quick(values: Iterable[Any], *quick: Any) -> list[Any]:
    """All values, as parameters of a test; all but the `quick` ones are marked slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]
