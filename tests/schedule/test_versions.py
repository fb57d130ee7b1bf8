"""The versions every pass sees, against closed forms and examples counted by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_schedule import action_of

from fxpipe.errors import ScheduleError
from fxpipe.plan.spec import PHASES
from fxpipe.schedule import Action, Async, AsyncLate, OneFOneB, Schedule, Versions, make
from fxpipe.schedule.versions import OwnVersions, most_missed


@pytest.mark.parametrize("workers", range(1, 9))
def test_async_weight_copies_in_closed_form(workers: int) -> None:
    versions = Versions(Async(workers))
    for reader, owner in product(range(workers), repeat=2):
        assert versions.lag("F", reader, owner) == workers - 1 - min(reader, owner)
        assert versions.lag("B", reader, owner) == max(0, reader - owner)


@given(st.sampled_from(["async", "nf1b", "gpipe", "1f1b", "zb-h1", "zb-h2"]), st.integers(1, 9), st.integers(1, 9))
def test_a_row_alone_tells_how_late_its_worker_is(name: str, workers: int, microbatches: int) -> None:
    schedule = make(name, workers, microbatches)
    versions = Versions(schedule)
    for worker in range(workers):
        own = OwnVersions(schedule, worker)
        for phase in schedule.phases:
            for microbatch in range(microbatches):
                asked = phase, worker, worker, microbatch
                assert own.lag(*asked) == versions.lag(*asked)


@given(st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2"]), st.integers(1, 6), st.integers(1, 5))
def test_with_a_flush_every_pass_sees_every_earlier_update(name: str, workers: int, microbatches: int) -> None:
    versions = Versions(make(name, workers, microbatches))
    for reader, owner, phase, j in product(range(workers), range(workers), PHASES, range(microbatches)):
        assert versions.lag(phase, reader, owner, j) == 0


def test_a_flush_that_is_none_is_refused() -> None:
    """Its F1 would have to see the update of minibatch 0, which comes after it."""

    class Eager(Async):
        synchronous = True

    with pytest.raises(ScheduleError, match="worker 0 waits at F1 for B0 of worker 0"):
        Versions(Eager(2))


@given(st.integers(1, 6), st.integers(1, 5))
def test_accumulation_without_a_flush_in_closed_form(workers: int, microbatches: int) -> None:
    """Before F of microbatch j of minibatch m, worker k has done mM + j − (N−1−k) backwards."""
    versions = Versions(Async(workers, microbatches))
    for k, j in product(range(workers), range(microbatches)):
        assert versions.lag("F", k, k, j) == max(0, ceil((workers - 1 - k - j) / microbatches))
        assert versions.lag("B", k, k, j) == 0


@given(st.integers(1, 6), st.integers(1, 6))
def test_nf1b_in_closed_form(workers: int, microbatches: int) -> None:
    """Worker k starts with M + 2(N−1−k) forwards; its backwards of a minibatch all come before its update."""
    versions, hop = Versions(make("nf1b", workers, microbatches)), min(2, microbatches)
    for k, j in product(range(workers), range(microbatches)):
        assert versions.lag("F", k, k, j) == max(0, ceil((hop * (workers - 1 - k) - j) / microbatches))
        assert versions.lag("B", k, k, j) == 0


def test_a_version_is_never_older_than_the_start() -> None:
    versions = Versions(Async(3))
    assert [versions.version(Action("F", m), reader=0, owner=0) for m in range(5)] == [0, 0, 0, 1, 2]
    assert [versions.version(Action("F", m), 0, 0, start=10) for m in range(10, 15)] == [10, 10, 10, 11, 12]


def test_a_schedule_whose_lag_changes_is_refused() -> None:
    """GPipe until minibatch 5, then asynchronous."""

    class Moody(Schedule):
        name = "moody"
        synchronous = False

        def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
            yield from OneFOneB(self.workers).until(worker, 5)
            yield from Async(self.workers).actions(worker, 5)

    with pytest.raises(ScheduleError, match="'moody' has no fixed lag: F1 on worker 0 sees version 1"):
        Versions(Moody(2))


def test_a_deadlock_is_refused() -> None:
    class Backwards(Schedule):
        name = "backwards"
        synchronous = False

        def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
            return Async(self.workers).actions(self.workers - 1 - worker, start)

    with pytest.raises(ScheduleError, match="deadlocks"):
        Versions(Backwards(2))


def test_async_late_updates_at_the_end_of_the_next_minibatch() -> None:
    schedule = AsyncLate(2, 3)
    assert schedule.update_of(4) == action_of("B5.2")
    assert schedule.updated_by(action_of("B5.2")) == 4
    assert schedule.updated_by(action_of("B5.1")) is None
    assert schedule.updated_by(action_of("F5.2")) is None
    assert schedule.updated_by(action_of("B0.2")) is None
    assert schedule.updated_by(action_of("B5.2"), start=5) is None  # what a flush has made already
    assert schedule.ends(action_of("B0.2"))


@given(st.integers(1, 6), st.integers(1, 6))
def test_async_late_misses_one_update_more(workers: int, microbatches: int) -> None:
    assert most_missed(AsyncLate(workers, microbatches)) == most_missed(make("async", workers, microbatches)) + 1
