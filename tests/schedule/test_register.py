"""`fxpipe.schedule.register`: schedules written in Python, and what is wrong with some."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import schedule
from fxpipe.errors import ScheduleError
from fxpipe.plan.build_folder import load_plan
from fxpipe.schedule import SCHEDULES, Async, Schedule, Versions, from_csv, lines_of, make
from fxpipe.schedule.action import Action
from fxpipe.schedule.check import held, unreceived


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
        ({"name": "1f1b"}, "there is already a schedule '1f1b'"),
        ({"name": "auto"}, "there is already a schedule 'auto'"),
        ({"name": "csv"}, "there is already a schedule 'csv'"),
        ({"synchronous": None}, "schedule 'own' does not say whether it has a flush"),
        ({"late": 1}, "schedule 'own' makes updates late"),
    ],
)
def test_what_is_not_registered(attributes: dict[str, Any], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        schedule.register(kind(gpipe, **attributes))
    assert "own" not in SCHEDULES


@pytest.mark.parametrize(("workers", "microbatches"), [(1, 1), (2, 1), (3, 1), (3, 2), (4, 4), (2, 3)])
def test_one_without_a_flush_is_what_it_says(workers: int, microbatches: int) -> None:
    """The order of `async`, as it is and as a plan has it: the same rows, weights, memory and rows after a resume."""
    schedule.register(type("Own", (Async,), {"name": "own"}))
    own, plain = make("own", workers, microbatches), make("async", workers, microbatches)
    again = from_csv("\n".join(lines_of(own)), title="own")
    assert again == own
    assert (again.name, again.synchronous, again.filled_by) == ("own", False, plain.filled_by)
    for worker in range(workers):
        assert list(own.until(worker, 9)) == list(plain.until(worker, 9))
        assert [*islice(own.row_after(worker, 40, 2), 20)] == [*islice(plain.row_after(worker, 40, 2), 20)]
        for reader in range(workers):
            for phase in own.phases:
                assert Versions(own).lag(phase, reader, worker) == Versions(plain).lag(phase, reader, worker)
    assert (held(own), unreceived(own)) == (held(plain), unreceived(plain))


def overlapping(self: Schedule, worker: int, start: int = 0) -> Iterator[Action]:
    yield from (Action("F", start, i) for i in range(self.microbatches))
    for minibatch in count(start):
        yield from (Action("F", minibatch + 1, i) for i in range(self.microbatches))
        yield from (Action("B", minibatch, i) for i in range(self.microbatches))


def ending(self: Schedule, worker: int, start: int = 0) -> Iterator[Action]:
    yield from (Action(phase, start, i) for phase in ("F", "B") for i in range(self.microbatches))


@pytest.mark.parametrize("actions", [overlapping, ending])
def test_one_with_a_flush_does_what_it_does_in_its_first_minibatch(actions: Any) -> None:
    schedule.register(type("Own", (Schedule,), {"actions": actions, "name": "own", "synchronous": True}))
    with pytest.raises(ScheduleError, match="does not repeat what it does in its first minibatch"):
        lines_of(make("own", 2, 2))


def deep(twice: int) -> type[Schedule]:
    """Runs ahead further than `async` does."""

    def actions(self: Schedule, worker: int, start: int = 0) -> Iterator[Action]:
        ahead = twice * (self.workers - 1 - worker)
        yield from (Action("F", start + i, 0) for i in range(ahead))
        for i in count():
            yield Action("F", start + i + ahead, 0)
            yield Action("B", start + i, 0)

    return type("Own", (Schedule,), {"actions": actions, "name": "own", "synchronous": False})


def test_one_without_a_flush_may_run_further_ahead() -> None:
    schedule.register(deep(3))
    made = make("own", 3)
    assert lines_of(made)[2] == "2B0".join(["|2F0,", ""])
    assert made.filled_by == 7
    assert held(made) == (7, 4, 1)
    assert Versions(made).lag("F", 0, 0) == 6


def test_one_without_a_flush_that_never_repeats_itself_is_refused() -> None:
    def actions(self: Schedule, worker: int, start: int = 0) -> Iterator[Action]:
        for i in count():
            order = [("F", 2 * i), ("B", 2 * i), ("F", 2 * i + 1), ("B", 2 * i + 1)]
            swapped = [order[0], order[2], order[1], order[3]]
            yield from (Action(phase, start + m, 0) for phase, m in (order if i % 2 else swapped))

    schedule.register(type("Own", (Schedule,), {"actions": actions, "name": "own", "synchronous": False}))
    with pytest.raises(
        ScheduleError, match="'own' has no flush, and worker 0 does not repeat the same actions after 7 minibatches"
    ):
        make("own", 1)


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0B0|",
        "|0F0,0B0\n1F0,1B0",
        "|0B0",
        "|0F0",
        "|0F0,0F1,0B0,0B0",
        "|0B0,0F0",
        "|0F0|0B0",
        "|1F0,1B0",
        "0F0,0B0\n|1F0,1B0",
    ],
)
def test_rows_without_a_flush_that_are_wrong(text: str) -> None:
    with pytest.raises(ScheduleError):
        from_csv(text)


def test_one_without_a_flush_trains_as_its_order_says(tmp_path: Path) -> None:
    schedule.register(type("Own", (Async,), {"name": "own"}))
    torch.manual_seed(3)
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())])
    batches = torch.randn(8, 4, 4)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x.flip(1)).square().mean()

    asked = {"workers": 3, "microbatches": 2, "cost": "analytic"}
    losses = []
    for name in ("own", "async"):
        fxpipe.compile(model, loss, batches[0], schedule=name, **asked).save(tmp_path / name)
        SCHEDULES.pop("own", None)  # whatever reads the build knows it by its rows
        plan = load_plan(tmp_path / name)
        assert (plan.schedule, plan.policy, bool(plan.rows)) == (name, "spectrain", name == "own")
        with fxpipe.load(tmp_path / name).local() as pipeline:
            losses.append([pipeline.step(batch) for batch in batches])
    assert losses[0] == losses[1]


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
