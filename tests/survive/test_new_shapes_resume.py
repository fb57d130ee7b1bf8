"""Runs whose shapes are made on demand: in processes as in one, killed and gone on with, to the same bits."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, finish, fxpipe, start_module
from own_loops import halving, in_processes, optimizer, play
from safetensors.torch import load_file

import fxpipe as api
from fxpipe.task.model_file import load_task

MODEL = """
import os
import random
import time

import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        x = x + torch.tensor([0.1 * i for i in range(ids.shape[1])])[:, None]
        for layer in self.layers:
            x = torch.tanh(self.drop(layer(x)))
        return self.head(x)


def model():
    return Reader()


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def pad(texts):
    time.sleep(float(os.environ.get("SLOW", "0")))
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def train_data():
    draw = random.Random(3)
    lengths = [5] * 4 + [draw.randint(2, longest) for longest in (7, 3, 6, 3, 7) for _ in range(4)]
    texts = [torch.randint(1, 11, (n,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(lengths)]
    return torch.utils.data.DataLoader(texts, batch_size=4, collate_fn=pad)


def optimizer(named):
    return torch.optim.AdamW([p for _, p in named], lr=0.01)
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(MODEL)
    return path


def compiled(model_file: Path, build: Path, workers: int, schedule: str, scan: int) -> Path:
    count = 1 if schedule == "async" else 2
    options = ["-n", workers, "--schedule", schedule, "--scan", scan, "--microbatches", count]
    result = fxpipe("compile", model_file, "-o", build, *options, *QUICK)
    assert result.code == 0, result.err
    return build


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(("schedule", "workers"), [("async", 3), ("1f1b", 2)])
def test_two_epochs_of_padded_batches_are_those_of_a_build_that_has_them_all(
    model_file: Path, tmp_path: Path, schedule: str, workers: int
) -> None:
    one = compiled(model_file, tmp_path / "one", workers, schedule, 1)
    whole = compiled(model_file, tmp_path / "whole", workers, schedule, 6)
    run = ("--epochs", 2, "--threads", 1, "--json")
    new = ("--new-shapes", 8)
    losses = []
    for name, more in (("apart", (one, *new)), ("local", (one, *new, "--local")), ("all", (whole,))):
        result = fxpipe("run", *more, *run, "--out", tmp_path / f"out_{name}")
        assert result.code == 0, result.err
        losses.append(json.loads(result.out)["losses"])
        if name == "local":
            assert "stages for it were made in" in result.err
    weights = [load_file(tmp_path / f"out_{name}" / "model.safetensors") for name in ("apart", "local", "all")]
    for found in weights[:2]:
        torch.testing.assert_close(found, weights[2], rtol=0, atol=0)
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 12
    refused = fxpipe("run", one, *run, "--out", tmp_path / "out_refused")
    assert refused.code == 1
    assert "does not fit the captured program" in refused.err
    assert "--new-shapes" in refused.err


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_killed_run_makes_its_shapes_again(model_file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    build = compiled(model_file, tmp_path / "build", 2, "async", 1)
    run = ("run", build, "--steps", 24, "--threads", 1, "--new-shapes", 8)
    assert fxpipe(*run, "--local", "--out", tmp_path / "whole").code == 0
    out = tmp_path / "out"
    monkeypatch.setenv("SLOW", "0.3")
    process = start_module("fxpipe", *run, "--checkpoint-every", 3, "--out", out)
    end = time.monotonic() + 180
    while not (out / "checkpoints" / "step-6").is_dir():
        assert time.monotonic() < end
        assert process.poll() is None, finish(process, 10).err
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert finish(process, 120).code != 0
    assert not (out / "model.safetensors").exists()
    monkeypatch.delenv("SLOW")
    again = ("run", build, "--steps", 24, "--threads", 1)  # the option is the checkpoint's
    result = fxpipe(*again, "--checkpoint-every", 3, "--resume", "--out", out)
    assert result.code == 0, result.err
    found, wanted = (load_file(place / "model.safetensors") for place in (out, tmp_path / "whole"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.multiproc
def test_own_loops_in_processes_make_them_as_one(model_file: Path, tmp_path: Path) -> None:
    build = compiled(model_file, tmp_path / "build", 3, "async", 1)
    task = load_task(model_file)
    batches = list(task.train_data())
    torch.save(batches, tmp_path / "batches.pt")
    steps = [("step",)] * 5
    calls = [*steps, ("save",), *steps, ("flush",), ("load",), *steps]
    hooks = {"model": task.model, "loss": task.loss}
    with api.load(build).local(optimizer=optimizer, lr_scheduler=halving, **hooks) as pipeline:
        alone = play(pipeline, calls, batches, tmp_path / "local")
        state = pipeline.state_dict()
    files = {"batches": str(tmp_path / "batches.pt"), "held_out": None, "model_file": str(model_file)}
    loop = {"build": str(build), "calls": calls, "options": {}, **files}
    ((found, weights),) = in_processes([loop], 3, tmp_path)
    assert found == [alone] * 3
    for name, weight in weights.items():
        assert torch.equal(weight, state[name]), name
