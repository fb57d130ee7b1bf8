"""The planner against brute force."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import CutError
from fxpipe.planner.balance import BalancedCuts, bidirectional_cuts, same_cuts, worker_loads

TIMES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)
SPEEDS = st.lists(st.sampled_from([1.0, 0.5, 2.0]), min_size=1, max_size=3)


def all_cuts(units: int, workers: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations_with_replacement(range(units + 1), workers - 1):
        yield (0, *inner, units)


def slowest(
    forward: list[float], backward: list[list[float]], f: tuple[int, ...], b: tuple[int, ...], speeds: list[float]
) -> float:
    return max(
        (sum(forward[f[k] : f[k + 1]]) + sum(backward[k][b[k] : b[k + 1]])) / speed for k, speed in enumerate(speeds)
    )


@given(TIMES, SPEEDS, st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_both_equal_brute_force(times: list[tuple[int, int]], speeds: list[float], own: list[int]) -> None:
    """Worker k needs `own[k]` more for the backward of every second unit."""
    forward = [float(f) for f, _ in times]
    backward = [[float(b + own[k] * (i % 2)) for i, (_, b) in enumerate(times)] for k in range(len(speeds))]
    cuts = list(all_cuts(len(times), len(speeds)))
    same = same_cuts(forward, backward, speeds)
    assert same.forward == same.backward
    assert same.bottleneck == pytest.approx(min(slowest(forward, backward, c, c, speeds) for c in cuts))
    free = bidirectional_cuts(forward, backward, speeds)
    best = min(slowest(forward, backward, f, b, speeds) for f in cuts for b in cuts)
    assert free.bottleneck == pytest.approx(best)
    for balance in (same, free):
        assert balance.forward in cuts
        assert balance.backward in cuts
        assert balance.bottleneck == pytest.approx(
            slowest(forward, backward, balance.forward, balance.backward, speeds)
        )


def test_loads_of_hand_made_cuts() -> None:
    balance = BalancedCuts((0, 1, 3), (0, 2, 3), 0.0)
    assert worker_loads([1, 2, 3], [[10, 20, 30]] * 2, balance, [1, 0.5]) == [31.0, 70.0]


def test_ten_thousand_units_and_sixty_four_workers_take_seconds() -> None:
    random = np.random.default_rng(0)
    forward, backward = random.random(10_000), 2 * random.random(10_000)
    start = time.perf_counter()
    found = bidirectional_cuts(list(forward), [list(backward)] * 64, [1.0] * 64)
    assert time.perf_counter() - start < 60  # seconds here; the limit only catches another order of growth
    ideal = (forward.sum() + backward.sum()) / 64
    assert ideal <= found.bottleneck < ideal * 1.001


def test_nothing_to_cut_is_refused() -> None:
    with pytest.raises(CutError, match="no units"):
        same_cuts([], [], [1.0])
    with pytest.raises(CutError, match="speed above zero"):
        bidirectional_cuts([1.0], [[1.0]] * 2, [1.0, 0.0])
