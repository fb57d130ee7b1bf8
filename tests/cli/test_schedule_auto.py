"""`--schedule auto`, `--synchronous` and `plan --compare` as their users meet them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import QUICK, fxpipe
from model_files import write_model

from fxpipe.plan.build_folder import read_plan
from fxpipe.schedule import SCHEDULES, make, to_csv
from fxpipe.search import schedules_of

SAME = ("--cuts", "same")
"""Which leave a search that is not what is tested the fewest cuts to try."""

SYNCHRONOUS = {name for name, kind in SCHEDULES.items() if kind.synchronous}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    size = {"output_bytes": 100, "saved_bytes": 200, "fixed_bytes": 200}
    units = [{"name": f"u{i}", "forward_ms": 1, "backward_ms": 1, "weight_ms": 1, **size} for i in range(8)]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"units": units}))
    return path


def test_compile_prints_the_best_and_the_three_next(model: Path) -> None:
    result = fxpipe("compile", "model.py", *QUICK, *SAME, "--synchronous", "--memory", "200MB", "--verify")
    assert result.code == 0, result.err
    table = result.out[result.out.index("schedule  ") :]
    rows = [line.split() for line in table.splitlines()]
    rows = [row for row in rows if row[:1] and row[0] in SCHEDULES and row[1].isdecimal()]
    assert len(rows) == 4
    plan = read_plan("build")
    assert (rows[0][0], rows[0][1]) == (plan.schedule, str(plan.microbatches))
    assert "the one to take" in table
    assert {row[0] for row in rows} <= SYNCHRONOUS
    header = Path("build/stage_0.py").read_text()
    assert f"--schedule auto --synchronous --microbatches {plan.microbatches}" in header


def test_a_run_needs_no_option(model: Path) -> None:
    said = fxpipe("compile", "model.py", *QUICK, *SAME, "--schedule", "auto", "--synchronous", "--json").json
    assert said["schedule"] == said["schedules"][0]["schedule"]
    assert said["schedules"][0]["why"] == ""
    assert all(row["why"] for row in said["schedules"][1:])
    assert {row["staleness"] for row in said["schedules"]} == {0}
    run = fxpipe("run", "build", "--steps", "3", "--local", "--json").json
    assert run["schedule"] == said["schedule"]
    found = fxpipe("inspect", "build", "--json").json
    assert found["schedules"] == said["schedules"]


def test_contradictions_are_refused(model: Path) -> None:
    result = fxpipe("compile", "model.py", "--synchronous", "--schedule", "async")
    assert result.code == 1
    assert "schedule 'async' is not synchronous: its forwards miss updates" in result.err
    fxpipe("compile", "model.py", *QUICK, "-o", "first")
    result = fxpipe("compile", "model.py", *QUICK, "--like", "first", "--synchronous")
    assert "'async' is not synchronous" in result.err
    result = fxpipe("inspect", "first", "--schedule", "auto")
    assert "there is no schedule 'auto'" in result.err
    result = fxpipe("plan", "model.py", "--compare", "--schedule", "1f1b")
    assert "--compare compares all schedules: leave --schedule 1f1b out" in result.err


def test_memory_that_nothing_fits_says_what_would(model: Path) -> None:
    result = fxpipe("compile", "model.py", *QUICK, *SAME, "--synchronous", "--memory", "1kB")
    assert result.code == 1
    assert "which needs least)" in result.err
    assert "hint: give every worker" in result.err
    assert not Path("build").exists()


def test_a_schedule_may_be_named_as_synchronous(model: Path) -> None:
    said = fxpipe("compile", "model.py", *QUICK, "--synchronous", "--schedule", "1f1b", "--json").json
    assert (said["schedule"], said["schedules"]) == ("1f1b", [])


def test_a_compile_goes_on_with_the_schedule_of_a_file(model: Path) -> None:
    Path("rows.csv").write_text(to_csv(make("1f1b", 2, 2)))
    first = fxpipe("compile", "model.py", *QUICK, "-n", "2", "--schedule", "rows.csv", "-o", "first", "--json").json
    Path("rows.csv").unlink()
    again = fxpipe("compile", "model.py", *QUICK, "--like", "first", "-o", "again", "--json").json
    assert again["schedule"] == first["schedule"]
    assert again["microbatches"] == first["microbatches"]


def test_plan_compares_schedules_of_a_model(model: Path) -> None:
    asked = ("plan", "model.py", "-n", "2", "--cost", "analytic", *SAME)
    found = fxpipe(*asked, "--compare", "--json").json
    rows = [row for row in found["schedules"] if row["seconds"] is not None]
    assert {row["schedule"] for row in rows} == set(schedules_of(False))
    assert found["samples"] == 4
    refused = [row for row in found["schedules"] if row["seconds"] is None]
    assert [(row["schedule"], row["microbatches"]) for row in refused] == [("", 4)]  # batch norm of one sample
    seconds = [row["seconds"] for row in rows[1:]]
    assert seconds == sorted(seconds)
    same = fxpipe(*asked, "--schedule", "auto", "--json").json
    assert same == found
    exact = fxpipe(*asked, "--synchronous", "--json").json
    assert {row["schedule"] for row in exact["schedules"]} - {""} == SYNCHRONOUS


def test_plan_compares_schedules_of_a_profile(profile: Path) -> None:
    result = fxpipe("plan", profile, "-n", "2", "--compare", "--memory", "4kB", "--no-communication", *SAME)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert "a microbatch ms" in lines[0]
    assert any(line.split()[:2] == ["async", "4"] for line in lines)
    assert any("bubble" in line and "against" in line for line in lines)
    tight = fxpipe("plan", profile, "-n", "2", "--compare", "--memory", "3kB", "--no-communication", *SAME)
    assert "gpipe, 4 microbatches: does not fit: 3.13 KiB would be enough" in tight.out
    some = fxpipe("plan", profile, "-n", "2", "--compare", "--cuts", "same", "--microbatches", "4,8", "--json").json
    assert {row["cuts"] for row in some["schedules"]} == {"same"}
    assert {row["microbatches"] for row in some["schedules"]} == {4, 8}
