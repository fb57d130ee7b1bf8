"""examples/own_policy.py: a script that compares its policy, and a model file whose runs know it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from types import ModuleType

import pytest
from commands import QUICK, fxpipe, fxpipe_process, unchanged

from fxpipe.policy import POLICIES, make, sees
from fxpipe.schedule.action import Action
from fxpipe.schedule.asynchronous import Async
from fxpipe.task.model_file import imported

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_policy.py"


@pytest.fixture
def example() -> Iterator[ModuleType]:
    before = dict(POLICIES)
    yield imported(EXAMPLE)
    POLICIES.clear()
    POLICIES.update(before)


def test_the_policy_is_its_picture(example: ModuleType) -> None:
    picture = sees(make("halfway"), Async(3), minibatches=4)
    assert indent(picture, "    ") in (inspect.getdoc(example.Halfway) or "")


def test_half_of_an_odd_number_goes_up_or_down(example: ModuleType) -> None:
    for text, wanted in (("halfway", [0, 1, 1, 2]), ("halfway+down", [0, 0, 1, 1])):
        assert [make(text).ahead(Action("F", 8), 8 - behind, 0, Async(4)) for behind in range(4)] == wanted


def test_the_script_compares_it(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(steps=24, seeds=1)
    picture, _, table = capsys.readouterr().out.rpartition("\n\n")
    assert picture.startswith(sees(make("halfway"), Async(4), minibatches=6))
    losses = {name: float(loss) for name, loss, _ in (line.split() for line in table.splitlines()[1:])}
    assert list(losses) == ["latest", "stash", "halfway", "halfway+down", "pipeoptim"]
    assert len(set(losses.values())) == len(losses)  # they are not one policy under several names
    assert all(0 < loss < 3 for loss in losses.values())


@pytest.mark.slow
@pytest.mark.multiproc
def test_every_worker_of_a_run_knows_it(example: ModuleType, tmp_path: Path) -> None:
    build = tmp_path / "build"
    with unchanged(EXAMPLE.parent):
        assert fxpipe("compile", EXAMPLE, "-n", 2, "-o", build, *QUICK).code == 0
    arguments = ("run", build, "--steps", 8, "--threads", 1, "--json", "--out", tmp_path / "out", "--policy")
    processes = fxpipe_process(*arguments, "halfway").json["losses"]
    assert fxpipe(*arguments, "halfway", "--local").json["losses"] == processes
    # On two workers a forward is one update behind, of which a half rounded down is nothing.
    latest = fxpipe(*arguments, "latest", "--local").json["losses"]
    assert fxpipe(*arguments, "halfway+down", "--local").json["losses"] == latest != processes
    wrong = fxpipe_process(*arguments, "halfway+up")
    assert wrong.code == 1
    assert "halfway has: ef, brake, down" in wrong.err
