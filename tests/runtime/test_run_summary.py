"""What a run says of itself, whatever became of the files around it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe
from model_files import write_model

from fxpipe.observe.rates import Work
from fxpipe.observe.record import Record, RecordedStep
from fxpipe.observe.run_folder import read_run
from fxpipe.observe.run_json import RunJson, WorkerJson
from fxpipe.plan.build_folder import read_plan
from fxpipe.policy.recipe import choose
from fxpipe.runtime.process.run_summary import _forecast, _planned, peak_row, share_ranks


def samples(count: int) -> Callable[[int], Work]:
    return lambda minibatch: Work(count)


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


def test_what_was_planned_adds_up_to_a_minibatch(build: Path) -> None:
    plan, found = read_plan(build), forecast(build)
    assert found is not None
    for planned, row in zip(_planned(found, plan), found["workers"], strict=True):
        assert planned is not None
        of_a_minibatch = sum(planned.values()) * plan.own_microbatches + row["copy_ms"]
        assert of_a_minibatch == pytest.approx(found["milliseconds"])
    assert _planned(None, plan) == [None] * plan.workers


def test_a_worker_has_its_ranks_other_workers_beside_it() -> None:
    times = [
        (0, {"F": 2.0, "B": 3.0, "wait": 0.5}),
        (1, {"F": 1.0, "B": 1.0, "wait": 4.0}),
        (0, {"F": 3.0, "wait": 0.5}),
    ]
    rows = [WorkerJson(rank=rank, spent=spent | {"other": 10.0 - sum(spent.values())}) for rank, spent in times]
    share_ranks(rows)
    assert [row.spent.get("others") for row in rows] == [3.5, None, 5.5]
    assert [row.spent["other"] for row in rows] == [1.0, 4.0, 1.0]


def test_a_device_says_what_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"mem_get_info": (3, 9), "max_memory_allocated": 4, "max_memory_reserved": 5}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    row = {"peak_bytes": 4, "reserved_bytes": 5, "free_bytes": 3, "device_bytes": 9}
    assert (peak_row(torch.device("cuda", 0)), peak_row(torch.device("cpu"))) == (row, {})


@pytest.mark.parametrize("spoil", ["workers", "times", "text"])
def test_costs_that_make_no_sense_cost_the_forecast_alone(
    build: Path, tmp_path: Path, spoil: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "build"
    shutil.copytree(build, folder)
    costs = json.loads((folder / "costs.json").read_text())
    times = {"forward": 1.0, "backward": 1.0, "update": 0.0}
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
    (tmp_path / "run.json" / "in the way").mkdir(parents=True)
    RunJson(out=str(tmp_path)).write()
    assert "run.json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "steady"), [(5, None), (8, None), (9, 10.0), (20, 10.0)])
def test_the_steady_rate_is_between_filling_and_emptying(
    steps: int, steady: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("fxpipe.observe.pace.perf_counter", lambda: now[0])
    record = Record(None, samples(10), steps, workers=2)
    for step in range(steps):
        now[0] += 5.0 if step in (0, steps - 1) else 1.0
        record.step(RecordedStep(step, 1.0))
    assert record.pace.steady == steady


def test_evaluation_slows_no_rate_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each takes 7 s, and 2 s more until the workers are in step again."""
    now = [0.0]
    monkeypatch.setattr("fxpipe.observe.pace.perf_counter", lambda: now[0])
    record = Record(tmp_path, samples(10), 20, workers=2)
    for step in range(1, 21):
        now[0] += 1.0 + 2.0 * (step > 1 and step % 5 == 1)
        record.step(RecordedStep(step - 1, 1.0))
        if step % 5 == 0:
            now[0] += 7.0
            record.evaluated(step, {"accuracy": step / 20, "loss": float("nan")}, 7.0)
    record.close()
    assert record.pace.evaluation_seconds == 21.0  # the last one is after the last step
    assert record.pace.seconds == 26.0
    assert record.pace.rates["samples_per_second"] == pytest.approx(200 / 26)
    assert record.pace.steady == pytest.approx(10.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    rates = {line["step"]: line["samples_per_second"] for line in lines if "loss" in line}
    assert set(rates.values()) == {10.0, 3.33333}
    assert [step for step, rate in rates.items() if rate < 10] == [6, 11, 16]
    assert lines[5] == {"step": 5, "eval": {"accuracy": 0.25, "loss": None}}
    found = read_run(tmp_path)
    assert found["metrics"]["step"] == list(range(1, 21))
    assert found["evaluations"][0] == {"step": 5, "metrics": {"accuracy": 0.25, "loss": None}}
    assert [e["step"] for e in found["evaluations"]] == [5, 10, 15, 20]
    assert found["problems"] == ["run.json is missing: the run did not end, its settings and its timeline are unknown"]
