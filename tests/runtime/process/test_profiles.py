"""`--profile` and `--nvtx`: an operator's place in the schedule is in torch's profile, and in NVTX ranges."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from fxpipe.errors import RunError
from fxpipe.observe.watch import Ranges
from fxpipe.plan.build_folder import load_plan
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.check_run import check_profiler, check_run
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.start import run_local
from fxpipe.runtime.process.timelines import _TorchProfile, profiled_steps

Span = tuple[float, float, str]


def spans(path: Path, kind: str) -> list[Span]:
    """The beginnings, ends and names of the events of a kind."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == kind]
    return [(event["ts"], event["ts"] + event["dur"], event["name"]) for event in events]


def around(span: Span, others: Iterable[Span]) -> set[str]:
    return {name for begin, end, name in others if begin <= span[0] and span[1] <= end}


def check_file(path: Path, steps: Iterable[int], workers: int = 1) -> None:
    """The operators of these steps, each below its action; ranges nest."""
    ranges = spans(path, "user_annotation")
    assert {name for _, _, name in ranges if name[0] == "F"} == {f"F{step}" for step in steps}
    assert sum(name.startswith("B") and name[1:].isdigit() for _, _, name in ranges) >= len(list(steps))
    operators = spans(path, "cpu_op")
    places = [around(operator, ranges) for operator in operators if operator[2] == "aten::tanh"]
    assert places
    assert all(any(name[0] == "F" for name in place) for place in places)
    assert any("update" in name for operator in operators for name in around(operator, ranges))
    for one in ranges:
        for other in ranges:
            assert not one[0] < other[0] < one[1] < other[1], "ranges of a thread nest"


def test_all_workers_in_this_process(toy: Any, tmp_path: Path) -> None:
    folder, out = toy(forward=(0, 1, 2), backward=(0, 1, 2)).save(tmp_path / "build"), tmp_path / "out"
    summary = run_local(RunOptions(str(folder), steps=12, out=str(out), profile=2))
    assert [row["profile"] for row in summary["workers"]] == ["profile_0.json"] * 3
    ranges = spans(out / "profile_0.json", "user_annotation")
    assert {"F5", "F6"} <= {name for _, _, name in ranges}
    check_file(out / "profile_0.json", {int(name[1:]) for _, _, name in ranges if name[0] == "F"})
    plain = run_local(RunOptions(str(folder), steps=12, out=str(out)))
    assert plain["losses"] == summary["losses"]
    assert "profile" not in plain["workers"][0]
    assert not (out / "profile_0.json").exists(), "it is an earlier run's"


@pytest.mark.slow
@pytest.mark.multiproc
def test_each_process_has_a_file(toy: Any, tmp_path: Path, capfd: Any) -> None:
    folder, out = toy().save(tmp_path / "build"), tmp_path / "out"
    summary = launch(RunOptions(str(folder), steps=12, out=str(out), profile=3), 2)
    assert [row["profile"] for row in summary["workers"]] == ["profile_0.json", "profile_1.json"]
    for worker in range(2):
        check_file(out / f"profile_{worker}.json", range(4, 7))
    assert "send" in str(spans(out / "profile_0.json", "user_annotation"))
    assert capfd.readouterr().err == "", "torch's profiler says nothing"


def test_the_steps() -> None:
    assert profiled_steps(3, 4, range(100)) == range(6, 9)
    assert profiled_steps(3, 4, range(50, 100)) == range(56, 59)
    assert profiled_steps(3, 4, range(7)) == range(4, 7)
    assert profiled_steps(3, 4, range(2)) == range(2)


def test_a_model_that_fails(toy: Any, tmp_path: Path) -> None:
    """The error is the model's, no file is left, and the process can have another profiler."""
    out = tmp_path / "out"
    folder = toy(spoil={1: ("loss = (", "raise ValueError('mine')\n    loss = (")}).save(tmp_path / "build")
    for _ in range(2):
        with pytest.raises(RunError, match="mine"):
            run_local(RunOptions(str(folder), steps=1, out=str(out), profile=1))
    assert not list(out.glob("*profile*"))
    with torch.profiler.profile():
        torch.ones(1)


def test_a_run_that_ends_before(tmp_path: Path, capfd: Any) -> None:
    profile = _TorchProfile(range(4, 6), torch.device("cpu"), Ranges(record_function, on=False))
    for step in range(4):
        profile.begins(step)
    assert not profile.write(tmp_path / "profile_0.json")
    assert capfd.readouterr().err == "warning: nothing was profiled: the run ended before step 5\n"
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_costs_nothing_else(toy: Any, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "out"
    (out / "profile_0.json").mkdir(parents=True)
    summary = run_local(RunOptions(str(toy().save(tmp_path / "build")), steps=3, out=str(out), profile=1))
    assert "warning: the profile is lost: torch could not write " in capfd.readouterr().err
    assert "profile" not in summary["workers"][0]
    assert not list(out.glob("*.tmp"))


def test_refusals(toy: Any, tmp_path: Path) -> None:
    folder = str(toy().save(tmp_path / "build"))
    with pytest.raises(RunError, match="--nvtx names what runs on a GPU, and the build is for cpu"):
        check_run(RunOptions(folder, nvtx=True, out=str(tmp_path / "out")))
    with pytest.raises(RunError, match="this one has none"):
        check_run(RunOptions(folder, profile=1))


def test_one_profiler_at_a_time(toy: Any, tmp_path: Path) -> None:
    plan = dataclasses.replace(load_plan(str(toy().save(tmp_path / "build"))), device="cuda")
    check_profiler(RunOptions("build", nvtx=True), plan)
    with pytest.raises(RunError, match="two profilers"):
        check_profiler(RunOptions("build", nvtx=True, profile=1, out="out"), plan)


class Nvtx:
    """Stands in for NVTX: a stack of ranges for the thread."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[tuple[str, ...]] = []

    def rangePushA(self, name: str) -> int:
        self.open.append(name)
        self.seen.append(tuple(self.open))
        return len(self.open) - 1

    def rangePop(self) -> int:
        self.open.pop()
        return len(self.open)


@pytest.mark.parametrize("fails", [False, True])
def test_nvtx_ranges_match(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    nvtx = Nvtx()
    monkeypatch.setattr("torch.cuda.nvtx._nvtx", nvtx)
    monkeypatch.setattr("fxpipe.runtime.process.check_run.check_profiler", lambda options, plan: None)
    spoil = {2: ("loss = (", "raise ValueError('mine')\n    loss = (")} if fails else {}
    folder = str(toy(forward=(0, 1, 2), backward=(0, 1, 2), spoil=spoil).save(tmp_path / "build"))
    if fails:
        with pytest.raises(RunError, match="mine"):
            run_local(RunOptions(folder, steps=3, nvtx=True))
    else:
        run_local(RunOptions(folder, steps=3, nvtx=True))
        outer = {stack[0] for stack in nvtx.seen}
        assert outer >= {f"{phase}{step}" for phase in "FB" for step in range(3)}
        assert ("B2", "update 2") in nvtx.seen or ("update 2",) in nvtx.seen
    assert nvtx.seen
    assert nvtx.open == [], "each push has its pop"
