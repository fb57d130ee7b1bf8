"""Updates a minibatch late: which action makes them, and what every action then sees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxpipe.schedule import Action, AsyncLate, make
from fxpipe.schedule.versions import most_missed


def test_the_next_minibatch_ends_with_the_update() -> None:
    schedule = AsyncLate(2, 3)
    assert schedule.update_of(4) == Action.parse("B5.2")
    assert schedule.updated_by(Action.parse("B5.2")) == 4
    assert schedule.updated_by(Action.parse("B5.1")) is None
    assert schedule.updated_by(Action.parse("F5.2")) is None
    assert schedule.updated_by(Action.parse("B0.2")) is None
    assert schedule.updated_by(Action.parse("B5.2"), start=5) is None  # what a flush has made already
    assert schedule.ends(Action.parse("B0.2"))


@given(st.integers(1, 6), st.integers(1, 6))
def test_a_worker_misses_one_more(workers: int, microbatches: int) -> None:
    assert most_missed(AsyncLate(workers, microbatches)) == most_missed(make("async", workers, microbatches)) + 1
