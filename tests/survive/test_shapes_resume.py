"""A run over batches of several shapes that is asked to end goes on with the same bits."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, finish, fxpipe, start_module
from safetensors.torch import load_file

MODEL = """
import os
import time

import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = torch.tanh(self.drop(layer(x))) + x.cumsum(1) / ids.shape[1]
        return self.head(x)


def model():
    torch.manual_seed(0)
    return Reader()


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batches():
    sizes = ((8, 6), (8, 3), (4, 6), (4, 9))
    for number in range(24):
        draw = torch.Generator().manual_seed(number)
        size = sizes[number if number < 4 else number * number % 7 % 4]
        yield torch.randint(0, 11, size, generator=draw), torch.randint(0, 11, size, generator=draw)


def train_data():
    for batch in batches():
        time.sleep(float(os.environ.get("SLOW", "0")))
        yield batch


def optimizer(named):
    return torch.optim.AdamW([p for _, p in named], lr=0.01)
"""
APART = {"forward_at": ("layers.1", "layers.3"), "backward_at": ("layers.0", "layers.2")}
HOOKS: dict[str, Any] = {}
exec(MODEL, HOOKS)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("schedule", ["async", "1f1b"])
def test_processes_end_and_go_on(schedule: str, tmp_path: Path, monkeypatch: Any) -> None:
    """SIGTERM asks for a checkpoint at a step that nobody knew of: shapes are read ahead of it."""
    (tmp_path / "model.py").write_text(MODEL)
    build = tmp_path / "build"
    cuts = [word for at in APART["forward_at"] for word in ("--fp-cut", at)]
    cuts += [word for at in APART["backward_at"] for word in ("--bp-cut", at)]
    result = fxpipe("compile", tmp_path / "model.py", "-o", build, "-n", 3, "--schedule", schedule, "--scan", 4, *cuts,
                    "--microbatches", 1 if schedule == "async" else 2, *QUICK)  # fmt: skip
    assert result.code == 0, result.err
    run = ("run", build, "--steps", 24, "--threads", 1)
    assert fxpipe(*run, "--local", "--out", tmp_path / "whole").code == 0
    out = tmp_path / "out"
    monkeypatch.setenv("SLOW", "0.15")
    process = start_module("fxpipe", *run, "--checkpoint-every", "1h", "--out", out)
    end = time.monotonic() + 120
    while _lines(out) <= 4:
        assert time.monotonic() < end
        assert process.poll() is None, finish(process, 10).err
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process, 120).code != 0
    assert not (out / "model.safetensors").exists()
    monkeypatch.delenv("SLOW")
    result = fxpipe(*run, "--resume", "--out", out)
    assert result.code == 0, result.err
    found, wanted = (load_file(place / "model.safetensors") for place in (out, tmp_path / "whole"))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert _lines(out) == 24


def _lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0
