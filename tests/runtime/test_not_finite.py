"""A loss that is not finite ends a run, in one process and in several, and the error says what was not finite first."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from commands import QUICK, Result, fxpipe, fxpipe_process
from model_files import write_model
from safetensors.torch import load_file

from fxpipe.runtime.worker.not_finite import NotFinite, is_finite, not_finite

BAD_BATCH = """

def train_data():
    for number in range(12):
        x = torch.randn(4, 6)
        yield {"x": x * float("VALUE") if number == 5 else x, "y": torch.randint(0, 3, (4,))}
"""
BAD_GRADIENT = """

def train_data():
    for number in range(12):
        x = torch.randn(4, 6)
        yield {"x": torch.cat([x[:, :5], torch.full((4, 1), 0.0 if number == AT else 1.0)], 1),
               "y": torch.randint(0, 3, (4,))}
"""


LOCALLY = pytest.mark.parametrize(
    "local", [True, pytest.param(False, marks=[pytest.mark.multiproc, pytest.mark.slow])], ids=["local", "processes"]
)


def build(folder: Path, text: str, *edits: tuple[str, str]) -> Path:
    model = write_model(folder, *edits)
    model.write_text(model.read_text() + text)
    result = fxpipe("compile", model, "-o", folder / "build", "--fp-cut", "blocks.2", *QUICK)
    assert result.code == 0, result.err
    return folder / "build"


def spoiling(folder: Path, where: str, at: int) -> Path:
    """A build in which a scale's gradient is infinite at one step, whose loss is finite: sqrt at 0."""
    name = {"first": "self.early", "head": "self.late"}[where]
    layer = "        self.first = nn.Linear(6, 8)\n"
    edits = [(layer, f"{layer}        {name} = nn.Parameter(torch.ones(1))\n")]
    if where == "first":
        line = "x = torch.tanh(self.first(x)"
        edits.append((f"{line})", f"{line} + torch.sqrt({name} * x[:, 5:]))"))
    else:
        edits.append(("    def forward(self, x):\n", "    def forward(self, x):\n        last = x[:, 5:]\n"))
        line = "return self.head(self.norm(x))"
        edits.append((line, f"{line} + torch.sqrt({name} * last)"))
    return build(folder, BAD_GRADIENT.replace("AT", str(at)), *edits)


def run(folder: Path, local: bool, *more: object, out: str = "out") -> Result:
    arguments = ("run", folder, "--steps", 9, "--threads", 1, "--out", folder.parent / out, *more)
    return fxpipe(*arguments, "--local") if local else fxpipe_process(*arguments)


@LOCALLY
@pytest.mark.parametrize(("value", "schedule"), [("nan", "async"), ("inf", "1f1b")])
def test_a_batch_that_is_not_finite(tmp_path: Path, local: bool, schedule: str, value: str) -> None:
    folder = build(tmp_path, BAD_BATCH.replace("VALUE", value))
    result = run(folder, local, "--schedule", schedule)
    assert result.code == 1
    assert "the loss of step 6 is nan, on worker 1: all weights and gradients were finite" in result.err
    assert "--keep-going continues training" in result.err
    assert result.err.count("error:") == 1
    assert "Traceback" not in result.err
    assert not (tmp_path / "out" / "model.safetensors").exists()


@LOCALLY
@pytest.mark.parametrize(
    ("where", "name", "worker", "schedule"), [("first", "early", 0, "async"), ("head", "late", 1, "1f1b")]
)
def test_gradients_that_are_not_finite_while_the_loss_is(
    tmp_path: Path, local: bool, schedule: str, where: str, name: str, worker: int
) -> None:
    folder = spoiling(tmp_path, where, at=4)
    result = run(folder, local, "--schedule", schedule)
    assert result.code == 1
    said = re.search(r"the loss of step (\d) is nan, on worker 1: the gradients of these weights were", result.err)
    assert said is not None, result.err
    assert 6 <= int(said[1]) <= 8
    assert f"{name} (worker {worker})" in result.err or f"{name}, " in result.err, result.err
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert all(line["loss"] is not None for line in lines)


@LOCALLY
def test_with_clipping_the_step_of_the_gradients_is_known(tmp_path: Path, local: bool) -> None:
    folder = spoiling(tmp_path, "head", at=4)
    for schedule in ("async", "1f1b"):
        result = run(folder, local, "--schedule", schedule, "--clip-norm", 1.0)
        assert result.code == 1
        assert "at step 5 these gradients were not finite: " in result.err
        assert "late" in result.err


@LOCALLY
def test_the_last_step_too(tmp_path: Path, local: bool) -> None:
    """No later loss would show it."""
    folder = spoiling(tmp_path, "head", at=8)
    result = run(folder, local)
    assert result.code == 1
    assert "after the last step, 9, weights are not finite: the gradients of these weights were not" in result.err
    assert "late" in result.err
    assert not (tmp_path / "out" / "model.safetensors").exists()


@LOCALLY
def test_keep_going_trains_on_and_counts(tmp_path: Path, local: bool) -> None:
    folder = build(tmp_path, BAD_BATCH.replace("VALUE", "nan"))
    result = run(folder, local, "--keep-going", "--json", "--schedule", "1f1b")
    assert result.json["steps"] == 9
    assert result.json["not_finite"]["losses"] == 4
    assert result.json["not_finite"]["weights"] > 0
    assert "4 losses are not finite, first at step 6" in result.err
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert not all(weight.isfinite().all() for weight in weights.values())


@LOCALLY
def test_an_earlier_runs_files_stay(tmp_path: Path, local: bool) -> None:
    folder = build(tmp_path, BAD_BATCH.replace("VALUE", "nan"))
    assert run(folder, True, "--steps", 3).code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert run(folder, local).code == 1
    assert {name: (tmp_path / "out" / name).read_bytes() for name in before} == before


@pytest.mark.multiproc
def test_workers_in_processes_tell_what_they_see(tmp_path: Path) -> None:
    result = run(spoiling(tmp_path, "first", at=4), False)
    assert result.code == 1
    assert "is nan, on worker 1: the gradients of these weights were not finite before: early (worker 0)" in result.err


def test_the_error_names_the_first_step() -> None:
    found = [
        NotFinite(1, [f"w{i}" for i in range(9)], ["b"], 7),
        NotFinite(0, ["a"], ["a"], 8),
        NotFinite(2, [], [], None),
    ]
    error = not_finite(8, float("inf"), 2, found, 3)
    assert (
        error.what == "the loss of step 9 is inf, on worker 2: at step 7 these gradients were not finite: b (worker 1)"
    )
    many = not_finite(8, float("inf"), 1, [NotFinite(1, [f"w{i}" for i in range(9)], [], None), found[2]], 3)
    assert "not finite before: w0, w1, w2, w3, w4 and 4 more (worker 1)" in many.what
    assert many.what.endswith("; as far as is known, without worker 0, which did not answer")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int32])
def test_every_kind_of_weight_can_be_looked_at(dtype: torch.dtype) -> None:
    values = torch.ones(4).to(dtype)
    assert is_finite(values)
    if dtype != torch.int32:
        values = torch.tensor([1.0, float("nan")]).to(dtype)
        assert not is_finite(values)
