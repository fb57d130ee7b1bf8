"""Some of a product for the quick tests, all of it for the slow ones."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def covering(*axes: Collection[Any], strength: int = 2) -> list[Any]:
    """All combinations of the axes' values, as parameters of a test; most of them are marked slow.

    The others are as few as a greedy choice finds, so that each value of an axis meets each one of every other axis
    (`strength` 2), or so that each value is there (`strength` 1).
    """
    combinations = list(itertools.product(*axes))
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    parts = [set(itertools.combinations(enumerate(place), strength)) for place in places]
    left, quick = set().union(*parts), set()
    while left:
        best = max(range(len(parts)), key=lambda i: len(parts[i] & left))
        quick.add(best)
        left -= parts[best]
    slow = pytest.mark.slow
    return [pytest.param(*c, marks=() if i in quick else slow) for i, c in enumerate(combinations)]


def a_few_quick(values: Iterable[Any], *quick: Any) -> list[Any]:
    """All values, as parameters of a test; all but the `quick` ones are marked slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]
