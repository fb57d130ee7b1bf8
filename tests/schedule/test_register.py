"""`fxpipe.schedule.register`: schedules written in Python, and what is wrong with some."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from fxpipe import schedule
from fxpipe.errors import ScheduleError
from fxpipe.schedule import SCHEDULES, Schedule, from_csv, lines_of, make
from fxpipe.schedule.action import Action


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = dict(SCHEDULES)
    yield
    SCHEDULES.clear()
    SCHEDULES.update(before)


def kind(rows: Any, **attributes: Any) -> type[Schedule]:
    """A schedule whose worker does these microbatches of these phases, in each minibatch."""

    def actions(self: Schedule, worker: int, start: int = 0) -> Iterator[Action]:
        for minibatch in count(start):
            for phase, microbatch in rows(worker):
                yield Action(phase, minibatch, microbatch)

    return type("Own", (Schedule,), {"actions": actions, "name": "own", "synchronous": True, **attributes})


def gpipe(worker: int) -> list[tuple[str, int]]:
    return [("F", 0), ("F", 1), ("B", 0), ("B", 1)]


def test_a_plan_holds_its_rows() -> None:
    schedule.register(kind(gpipe))
    made = make("own", 2, 2)
    assert lines_of(made) == ("0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1")
    again = from_csv("\n".join(lines_of(made)), title="own")
    assert (again.name, again.workers, again.microbatches) == ("own", 2, 2)
    assert [list(again.until(worker, 2)) for worker in range(2)] == [list(made.until(worker, 2)) for worker in range(2)]
    assert lines_of(make("gpipe", 2, 2)) == ()


def test_registering_again_takes_the_place() -> None:
    first, second = kind(gpipe), kind(gpipe)
    schedule.register(first)
    schedule.register(second)  # as where a model file is imported twice
    assert type(make("own", 2, 2)) is second


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"name": ""}, "Own has no name"),
        ({"name": "a,b"}, "Own has no name"),
        ({"name": "1f1b"}, "there is a schedule '1f1b' already"),
        ({"name": "auto"}, "there is a schedule 'auto' already"),
        ({"name": "csv"}, "there is a schedule 'csv' already"),
        ({"synchronous": False}, "schedule 'own' has no flush"),
        ({"late": 1}, "schedule 'own' has no flush"),
    ],
)
def test_what_is_not_registered(attributes: dict[str, Any], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        schedule.register(kind(gpipe, **attributes))
    assert "own" not in SCHEDULES


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (lambda worker: [("F", 0), ("F", 1), ("B", worker), ("B", 1 - worker)],
         "own.*B"),
        (lambda worker: [("F", 0), ("F", 1), ("B", 0)], "own"),
        (lambda worker: [("B", 0), ("F", 0), ("F", 1), ("B", 1)], "own"),
        (lambda worker: [("F", 0), ("B", 0), ("F", 1), ("F", 2), ("B", 1), ("B", 2)], "own"),
        (lambda worker: 1 // 0, "schedule 'own' of 2 workers and 2 microbatches raised ZeroDivisionError"),
        (lambda worker: [("G", 0)], "own"),
    ],
)  # fmt: skip
def test_rows_that_break_a_law_are_refused(rows: Any, says: str) -> None:
    schedule.register(kind(rows))
    with pytest.raises(ScheduleError, match=says):
        make("own", 2, 2)
