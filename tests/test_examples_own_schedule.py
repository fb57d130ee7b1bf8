"""examples/own_schedule.py: a script that simulates its schedule, and a model file that compiles for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from types import ModuleType

import pytest
from commands import QUICK, fxpipe, fxpipe_process, unchanged

from fxpipe.plan.build_folder import read_plan
from fxpipe.schedule import SCHEDULES, grid, make
from fxpipe.search.candidate import schedules_of
from fxpipe.task.model_file import imported

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_schedule.py"


@pytest.fixture
def example() -> Iterator[ModuleType]:
    before = dict(SCHEDULES)
    yield imported(EXAMPLE)
    SCHEDULES.clear()
    SCHEDULES.update(before)


def test_the_schedule_is_its_picture(example: ModuleType) -> None:
    picture = grid(make("eager-1f1b", 3, 4), minibatches=1)
    assert indent(picture, "    ") in (inspect.getdoc(example.Eager1F1B) or "")


def test_a_search_tries_it(example: ModuleType) -> None:
    assert "eager-1f1b" in schedules_of(synchronous=True)


def test_the_script_simulates_it(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    plain, eager = ([float(row[column]) for row in rows] for column in (2, 3))
    assert eager[0] == plain[0], "without latency, there is nothing to hide"
    assert all(a < b for a, b in zip(eager[1:], plain[1:], strict=True))


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_build_knows_it_without_the_file(example: ModuleType, tmp_path: Path) -> None:
    build = tmp_path / "build"
    options = ("-n", 2, "--microbatches", 4, "-o", build, *QUICK)
    with unchanged(EXAMPLE.parent):
        assert fxpipe("compile", EXAMPLE, "--schedule", "eager-1f1b", *options).code == 0
    SCHEDULES.pop("eager-1f1b")
    assert read_plan(build).schedule == "eager-1f1b"
    inspected = fxpipe("inspect", build, "--json").json
    assert inspected["grid"]["schedule"] == inspected["forecast"]["schedule"] == "eager-1f1b"
    arguments = ("run", build, "--steps", 4, "--threads", 1, "--json", "--out")
    processes = fxpipe_process(*arguments, tmp_path / "processes", "--checkpoint-every", 2).json
    assert processes["schedule"] == "eager-1f1b"
    plain = fxpipe(*arguments, tmp_path / "plain", "--local", "--schedule", "1f1b").json
    assert processes["losses"] == plain["losses"], "every schedule with a flush trains alike"
    on = ("--resume", tmp_path / "processes" / "checkpoints" / "step-2")
    again = fxpipe(*arguments, tmp_path / "on", "--local", *on).json
    assert again["losses"][-2:] == processes["losses"][-2:]
    wrong = fxpipe("run", build, "--steps", 4, "--schedule", "late-1f1b", "--out", tmp_path / "wrong")
    assert "there is no schedule 'late-1f1b'" in wrong.err
