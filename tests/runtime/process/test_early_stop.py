"""Where a run can still end: beyond all that any worker has begun or awaits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fxpipe.runtime.process.consequences import EndingRow, furthest
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
    recipe: Any = SimpleNamespace(schedule=schedule)
    for rank in range(schedule.ranks):
        end, found = 1000, []
        last = (schedule.hosted(rank)[0], schedule.update_of(5))
        row = EndingRow(schedule.row_until(rank, 1000), lambda: end, lambda minibatch: False, recipe)  # noqa: B023
        while (event := row.next()) is not None:
            found.append(event)
            if event == last:
                end = 6 + furthest(schedule)
        assert found == list(schedule.row_until(rank, end))
