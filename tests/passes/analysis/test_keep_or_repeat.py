"""The choice of what to keep and what to compute again, against every choice there is."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.passes.analysis.keep_or_repeat import Item, KeepOrRepeat


@st.composite
def choices(draw: st.DrawFn) -> KeepOrRepeat:
    """Items of which each can be kept or computed again."""
    items: list[Item] = []
    for i in range(draw(st.integers(1, 7))):
        seconds = draw(st.sampled_from([0.0, 1.0, 2.0, 5.0, math.inf]))
        size = draw(st.sampled_from([1.0, 2.0, 8.0, *([] if math.isinf(seconds) else [math.inf])]))
        inputs = draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set()
        items.append(Item(seconds, size, tuple(sorted(inputs)), draw(st.booleans())))
    return KeepOrRepeat(items)


def brute_force(choice: KeepOrRepeat, price: float) -> float:
    """The least cost of all sets of items that are computed again."""
    count = len(choice.items)
    sets = (frozenset(v for v in range(count) if mask >> v & 1) for mask in range(1 << count))
    return min(cost(choice, repeated, price) for repeated in sets)


def cost(choice: KeepOrRepeat, repeated: frozenset[int], price: float) -> float:
    found = choice.keeping(repeated)
    seconds, size = [i.seconds for i in choice.items], [i.bytes for i in choice.items]
    whole = [sum(v for v in values if math.isfinite(v)) or 1.0 for values in (seconds, size)]
    return found.seconds / whole[0] + price * found.bytes / whole[1]


@given(choices(), st.sampled_from([0.01, 0.3, 1.0, 4.0, 50.0]))
def test_no_choice_costs_less(choice: KeepOrRepeat, price: float) -> None:
    found = choice.at(price)
    assert cost(choice, found.repeated, price) == pytest.approx(brute_force(choice, price), abs=1e-6 * (1 + price))


@given(choices())
def test_a_hull_runs_from_the_fastest_to_the_smallest_with_falling_returns(choice: KeepOrRepeat) -> None:
    hull = choice.hull(8)
    assert hull[0].seconds == pytest.approx(choice.at(0.0).seconds)
    for one, other in pairwise(hull):
        assert one.seconds <= other.seconds
        assert one.bytes > other.bytes
    slopes = [(b.seconds - a.seconds) / (a.bytes - b.bytes) for a, b in pairwise(hull)]
    assert all(slope <= after * (1 + 1e-6) + 1e-9 for slope, after in pairwise(slopes))
    assert len(choice.hull(3)) == min(len(hull), 3)


def test_what_can_be_neither_kept_nor_computed_again_is_refused() -> None:
    with pytest.raises(ValueError, match="be neither kept nor computed again"):
        KeepOrRepeat([Item(math.inf, math.inf, needed=True)]).at(1.0)
