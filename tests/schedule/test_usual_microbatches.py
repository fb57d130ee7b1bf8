"""How many microbatches a schedule makes of a minibatch where nothing is asked."""

from __future__ import annotations

import pytest

from fxpipe.schedule import Versions, kind_of, make
from fxpipe.schedule.base import divisors
from fxpipe.schedule.versions import most_missed


@pytest.mark.parametrize(("workers", "samples", "expected"), [(3, 32, 4), (3, 6, 3), (3, 2, 2), (1, 7, 1), (4, 7, 7)])
def test_a_flush_wants_as_many_as_workers(workers: int, samples: int, expected: int) -> None:
    assert kind_of("1f1b").usual_microbatches(workers, samples) == expected
    assert kind_of("gpipe").usual_microbatches(workers, samples) == expected


@pytest.mark.parametrize(
    ("workers", "samples", "expected"),
    [
        (1, 32, 1),
        (2, 32, 1),  # one update late anyway
        (3, 32, 4),
        (3, 6, 3),
        (4, 6, 3),  # N−1 are enough
        (8, 32, 8),
        (8, 12, 12),
        (8, 34, 2),  # 17 would be more than 2N
        (8, 4, 4),
        (5, 1, 1),
    ],
)
def test_async_wants_weights_one_update_old(workers: int, samples: int, expected: int) -> None:
    assert kind_of("async").usual_microbatches(workers, samples) == expected


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_where_samples_allow_it_no_forward_misses_two_updates(workers: int) -> None:
    count = kind_of("async").usual_microbatches(workers, 720720)  # every number up to 16 divides it
    lags = [Versions(make("async", workers, count)).lag("F", k, k, j) for k in range(workers) for j in range(count)]
    assert max(lags) == 1


def test_many_workers_have_that_by_the_closed_form() -> None:
    """Worker 0 misses ⌈(N−1)/M⌉ updates: `test_versions` has the proof."""
    for workers in range(2, 18):
        assert kind_of("async").usual_microbatches(workers, 720720) >= workers - 1


@pytest.mark.parametrize(("workers", "samples", "expected"), [(1, 8, 1), (2, 8, 2), (4, 24, 6), (4, 8, 8), (4, 4, 4)])
def test_nf1b_wants_weights_one_update_old(workers: int, samples: int, expected: int) -> None:
    assert kind_of("nf1b").usual_microbatches(workers, samples) == expected
    lags = [most_missed(make("nf1b", workers, count)) for count in divisors(samples) if count >= expected]
    assert max(lags) <= 1 or samples < 2 * (workers - 1)


def test_divisors() -> None:
    assert [divisors(n) for n in (1, 7, 12, 36)] == [[1], [1, 7], [1, 2, 3, 4, 6, 12], [1, 2, 3, 4, 6, 9, 12, 18, 36]]
