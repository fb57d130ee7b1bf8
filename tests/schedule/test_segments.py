"""The first minibatches of a run in segments of their own: 1f1b's order, and nothing late."""

from __future__ import annotations

from itertools import islice

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule import make
from fxpipe.schedule.segments import Segments

SIZES = [(workers, microbatches) for workers in (1, 2, 5) for microbatches in (1, 3, 7)]


@pytest.mark.parametrize(("workers", "microbatches"), SIZES)
@pytest.mark.parametrize("single", [0, 1, 4])
def test_the_rows_are_those_of_1f1b_and_then_those_of_async(workers: int, microbatches: int, single: int) -> None:
    schedule, flushed = make("async", workers, microbatches), make("1f1b", workers, microbatches)
    segments = Segments.of(single, schedule)
    for worker in range(workers):
        first = [*flushed.until(worker, single), *schedule.until(worker, 9, single)]
        assert list(segments.until(schedule, worker, 9)) == first
        endless = [*flushed.until(worker, single), *islice(schedule.actions(worker, single), 50)]
        assert list(islice(segments.actions(schedule, worker), len(endless))) == endless


def test_a_row_may_begin_and_end_anywhere() -> None:
    schedule, flushed = make("async", 3), make("1f1b", 3)
    segments = Segments(4)
    assert list(segments.until(schedule, 0, 2)) == list(flushed.until(0, 2))
    assert list(segments.until(schedule, 0, 9, 2)) == [*flushed.until(0, 4, 2), *schedule.until(0, 9, 4)]
    assert list(segments.until(schedule, 0, 9, 6)) == list(schedule.until(0, 9, 6))


def test_the_beginning_of_a_segment() -> None:
    assert [Segments(3).begins(m, 0) for m in range(6)] == [0, 1, 2, 3, 3, 3]
    assert [Segments(3).begins(m, 5) for m in range(5, 8)] == [5, 5, 5]
    assert [Segments(3).is_single(m) for m in range(5)] == [True, True, True, False, False]


@pytest.mark.parametrize(("name", "steps", "said"), [("1f1b", 2, "all steps are"), ("async", -1, "cannot begin")])
def test_refused(name: str, steps: int, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        Segments.of(steps, make(name, 2))
    assert Segments.of(0, make(name, 2)) == Segments()
