"""Where a run can still end: beyond all that any worker has begun or awaits."""

from __future__ import annotations

import pytest

from fxpipe.runtime.process.consequences import furthest
from fxpipe.runtime.process.training_loop import Limit, LimitedRow
from fxpipe.runtime.wires.one_process import Turns
from fxpipe.schedule import SCHEDULES, make
from fxpipe.schedule.action import LOOKAHEAD

CASES = [
    (name, kind.usual_placement(ranks, virtual), count)
    for name, kind in SCHEDULES.items()
    for virtual in {kind.usual_virtual, 2 if kind.synchronous else kind.usual_virtual}
    for ranks in (1, 2, 3, 5)
    for count in (1, 2, 4, 8)
]


@pytest.mark.parametrize(("name", "placement", "microbatches"), CASES)
def test_no_worker_has_looked_further(name: str, placement: tuple[int, ...], microbatches: int) -> None:
    schedule = make(name, len(placement), microbatches, placement)
    for rank in range(schedule.ranks):
        row, hosted = list(schedule.row_until(rank, 40)), schedule.hosted(rank)
        for version in range(1, 25):
            reached = max(row.index((worker, schedule.update_of(version - 1))) for worker in hosted)
            seen = row[: reached + 1 + LOOKAHEAD * len(hosted) + 1]
            assert max(action.minibatch for _, action in seen) <= version + furthest(schedule)


@pytest.mark.parametrize(("name", "placement", "microbatches"), CASES)
def test_a_shortened_row_is_that_of_a_shorter_run(name: str, placement: tuple[int, ...], microbatches: int) -> None:
    schedule = make(name, len(placement), microbatches, placement)
    for rank in range(schedule.ranks):
        limit, events = Limit(1000, 1000), []
        last = (schedule.hosted(rank)[0], schedule.update_of(5))
        row = LimitedRow(schedule, rank, limit, Turns())
        while (event := row.next()) is not None:
            events.append(event)
            if event == last:
                limit.end = 6 + furthest(schedule)
        assert not row.more()
        assert events == list(schedule.row_until(rank, 6 + furthest(schedule)))


@pytest.mark.parametrize(("name", "placement", "microbatches"), CASES)
def test_a_row_that_is_fed_is_that_of_a_run(name: str, placement: tuple[int, ...], microbatches: int) -> None:
    """However many minibatches are fed before the row goes on, and whether it is held before their end is known."""
    schedule = make(name, len(placement), microbatches, placement)
    for rank in range(schedule.ranks):
        limit, events = Limit(0), []
        row = LimitedRow(schedule, rank, limit, Turns())
        for limit.fed in (1, 2, 5, 11):
            events += iter(row.next, None)
        limit.end = 11
        assert [*events, *iter(row.next, None)] == list(schedule.row_until(rank, 11))
