"""Where a run can still end: beyond all that any worker has begun or awaits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fxpipe.runtime.process.early_stop import ending, furthest
from fxpipe.schedule import SCHEDULES, make
from fxpipe.schedule.action import LOOKAHEAD, Action

CASES = [(name, workers, count) for name in SCHEDULES for workers in (1, 2, 3, 5) for count in (1, 2, 4, 8)]


@pytest.mark.parametrize(("name", "workers", "microbatches"), CASES)
def test_no_worker_has_looked_further(name: str, workers: int, microbatches: int) -> None:
    schedule = make(name, workers, microbatches)
    for worker in range(workers):
        row = list(schedule.until(worker, 40))
        for version in range(1, 25):
            reached = row.index(Action("B", version - 1, microbatches - 1))
            seen = row[: reached + 1 + LOOKAHEAD + 1]
            assert max(action.minibatch for action in seen) <= version + furthest(schedule)


@pytest.mark.parametrize(("name", "workers", "microbatches"), CASES)
def test_a_shortened_row_is_that_of_a_shorter_run(name: str, workers: int, microbatches: int) -> None:
    schedule = make(name, workers, microbatches)
    recipe: Any = SimpleNamespace(schedule=schedule)
    for worker in range(workers):
        end, found = 1000, []
        for action in ending(schedule.until(worker, 1000), lambda: end, recipe):  # noqa: B023
            found.append(action)
            if action == Action("B", 5, microbatches - 1):
                end = 6 + furthest(schedule)
        assert found == list(schedule.until(worker, end))
