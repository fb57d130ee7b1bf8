"""What a run says of itself, whatever became of the files around it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import QUICK, fxpipe
from model_files import write_model

from fxpipe.folder import read_plan
from fxpipe.runtime.assembly import choose
from fxpipe.runtime.record import Record
from fxpipe.runtime.run_summary import _forecast, write_run


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("summary")
    assert fxpipe("compile", write_model(folder), "-o", folder / "build", *QUICK).code == 0
    return folder / "build"


def forecast(folder: Path) -> dict[str, Any] | None:
    plan = read_plan(folder)
    return _forecast(str(folder), plan, choose(plan))


def test_the_forecast_is_that_of_the_compile(build: Path, tmp_path: Path) -> None:
    found = forecast(build)
    assert found is not None
    said = fxpipe("inspect", build, "--json").json["forecast"]
    assert {key: found[key] for key in ("samples_per_second", "bubble", "milliseconds")} == {
        key: pytest.approx(said[key]) for key in ("samples_per_second", "bubble", "milliseconds")
    }
    slowest = max(w["forward_ms"] + w["backward_ms"] + w["update_ms"] + w["copy_ms"] for w in found["workers"])
    assert slowest <= found["milliseconds"] * (1 + 1e-9)
    assert all(w["copy_ms"] >= 0 for w in found["workers"])


@pytest.mark.parametrize("spoil", ["workers", "times", "text"])
def test_costs_that_make_no_sense_cost_the_forecast_alone(
    build: Path, tmp_path: Path, spoil: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "build"
    shutil.copytree(build, folder)
    costs = json.loads((folder / "costs.json").read_text())
    times = {"forward": 1.0, "backward": 1.0, "update": 0.0, "nodes": None}
    spoilt = {"workers": {"workers": costs["workers"][:1]}, "times": {"times": [times]}, "text": {"links": 3}}[spoil]
    (folder / "costs.json").write_text(json.dumps({**costs, **spoilt}))
    assert forecast(folder) is None
    assert "there is no forecast to compare the run with" in capsys.readouterr().err


def test_a_build_without_costs_has_no_forecast(build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(build, tmp_path / "build")
    (tmp_path / "build" / "costs.json").unlink()
    assert forecast(tmp_path / "build") is None
    assert capsys.readouterr().err == ""


def test_a_summary_that_cannot_be_written_is_only_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".run.json").mkdir()
    write_run({"out": str(tmp_path), "trace": None})
    assert "run.json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "steady"), [(5, None), (8, None), (9, 10.0), (20, 10.0)])
def test_the_steady_rate_is_between_filling_and_emptying(
    steps: int, steady: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("fxpipe.runtime.record.perf_counter", lambda: now[0])
    record = Record(None, 10, steps)
    for step in range(steps):
        now[0] += 5.0 if step in (0, steps - 1) else 1.0
        record.step(step, 1.0, None, None)
    assert record.steady_samples_per_second(2) == steady
