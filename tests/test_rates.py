"""A run's tokens and FLOPs a second, from the model file to every place where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import QUICK, Result, fxpipe

from fxpipe.observe.run_folder import read_run

MODEL = """
import json
import torch
from torch import nn
from torch.nn import functional as F
from fxpipe.observe.logger import Logger, register


def model():
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 50))


def loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train_data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(50, (4, length), generator=generator) for length in (7, 7, 11, 7)]


@register
class Lines(Logger):
    name = "lines"

    def log(self, step, seconds, values):
        with open(self.where, "a") as file:
            print(json.dumps({"step": step, "policy": self.run.settings["policy"], **values}), file=file)
"""
RATES = {"samples_per_second", "tokens_per_second", "tflops_per_device", "mfu"}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For batches of two lengths, in two microbatches."""
    folder = tmp_path_factory.mktemp("rates")
    (folder / "model.py").write_text(MODEL)
    done = fxpipe("compile", folder / "model.py", "-o", folder / "build", "--microbatches", 2, "--scan", 4, *QUICK)
    assert done.code == 0, done.err
    return folder / "build"


def run(build: Path, out: Path, *more: object) -> Result:
    return fxpipe("run", build, "--local", "--epochs", 1, "--out", out, *more)


def test_a_step_has_the_work_of_its_own_batch(build: Path, tmp_path: Path) -> None:
    log = tmp_path / "lines.jsonl"
    assert run(build, tmp_path / "out", "--peak", "2M", "--log", f"lines={log}").code == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    weights = 8 * 16 + 16 * 50
    for row, length in zip(rows, (6, 6, 10, 6), strict=True):
        assert row.keys() >= RATES
        tokens = row["tokens_per_second"]
        assert tokens == pytest.approx(length * row["samples_per_second"], rel=1e-4)
        assert row["tflops_per_device"] == pytest.approx(6 * weights * tokens / 1e12, rel=1e-4)
        assert row["mfu"] == pytest.approx(row["tflops_per_device"] / 2e-6, rel=1e-4)
    whole = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (whole["samples"], whole["tokens"], whole["flops"], whole["peak"]) == (4, 24, 6.0 * weights * 24, 2e6)
    assert whole["tokens_per_second"] == pytest.approx(4 * 28 / whole["seconds"])
    assert whole["mfu"] == pytest.approx(whole["tflops_per_device"] / 2e-6)
    logged = [json.loads(line) for line in log.open()]
    steps = [row for row in logged if "train/mfu" in row]
    assert [row["train/mfu"] for row in steps] == pytest.approx([row["mfu"] for row in rows], rel=1e-4)
    assert {row["policy"] for row in logged} == {whole["policy"]}
    assert read_run(tmp_path / "out")["metrics"]["mfu"] == [row["mfu"] for row in rows]


def test_runs_are_compared_by_what_they_know(build: Path, tmp_path: Path) -> None:
    """A processor has no peak of its own."""
    shown = run(build, tmp_path / "a").out
    assert "TFLOP/s/device" in shown
    assert "MFU" not in shown
    assert " MFU " in run(build, tmp_path / "b", "--peak", "2M").out
    speed = fxpipe("compare", tmp_path / "a", tmp_path / "b", "--json").json["speed"]
    assert [name for name in RATES if None in speed[name]] == ["mfu"]
    assert speed["mfu"][0] is None
    table = fxpipe("compare", tmp_path / "a", tmp_path / "b").out
    assert [line.split()[0] for line in table.splitlines() if "/s  " in line or "/device  " in line] == [
        "samples/s", "tokens/s", "TFLOP/s/device",
    ]  # fmt: skip


def test_an_unknown_logger_or_peak_is_refused(build: Path, tmp_path: Path) -> None:
    assert "there is no logger 'line', did you mean 'lines'?" in run(build, tmp_path / "out", "--log", "line").err
    assert "'fast' is not a rate" in run(build, tmp_path / "out", "--peak", "fast").err
