"""From a model file to trained weights: microbatches whose losses make the whole batch's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import QUICK, fxpipe

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def train_data():
    for step in range(6):
        targets = torch.randint(0, 5, (6, 4))
        targets[: step % 4 + 1, 1:] = -100
        yield {"x": torch.randn(6, 4, 6), "y": targets, "scale": torch.ones(6)}


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


def loss(model, batch):
    return F.cross_entropy(model(batch["x"] * batch["scale"]).flatten(0, 1), batch["y"].flatten())
"""
HOOKED = (
    MODEL.replace('batch["y"].flatten())', "batch['y'].flatten(), reduction='sum') / valid(batch).norm(p=1)")
    + """

def valid(batch):
    return (batch["y"].flatten() >= 0).float()


def loss_weight(batch):
    return valid(batch).sum()


microbatch_dims = {"x": 0, "y": 0, "scale": None}
"""
)
SCHEDULE = ("--schedule", "1f1b", "--microbatches", 3)


def compiled(folder: Path, text: str, *options: object) -> dict[str, object]:
    (folder / "model.py").write_text(text)
    result = fxpipe("compile", folder / "model.py", "-o", folder / "build", *QUICK, *SCHEDULE, *options, "--json")
    assert result.code == 0, result.err
    found: dict[str, object] = json.loads(result.out)
    return found


def trained(folder: Path, *options: object) -> tuple[list[float], bytes]:
    result = fxpipe("run", folder / "build", "--steps", 6, "--out", folder / "out", "--json", *options)
    assert result.code == 0, result.err
    return json.loads(result.out)["losses"], (folder / "out" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("text", [MODEL, HOOKED], ids=["found", "hooked"])
def test_losses_are_those_of_whole_batches(text: str, tmp_path: Path) -> None:
    """The scale of each feature is as long as the batch: each microbatch gets all of it."""
    verified = compiled(tmp_path, text, "--verify")["verify"]
    assert isinstance(verified, dict)
    assert max(v for v in verified.values() if isinstance(v, float)) < 1e-5
    plan = json.loads((tmp_path / "build" / "plan.json").read_text())
    assert {leaf["name"]: leaf["dim"] for leaf in plan["batch"]} == {
        "batch['x']": 0,
        "batch['y']": 0,
        "batch['scale']": None,
        "loss_weight" if text is HOOKED else "total.0": None,
    }
    losses = trained(tmp_path, "--local")[0]
    assert losses == pytest.approx(trained(tmp_path, "--local", "--schedule", "gpipe")[0], rel=1e-5)
    compiled(tmp_path, text, "--microbatches", 1)
    assert losses == pytest.approx(trained(tmp_path, "--local")[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("text", [MODEL, HOOKED], ids=["found", "hooked"])
@pytest.mark.parametrize("options", [(), ("--schedule", "async"), ("--clip-norm", 0.1)], ids=str)
def test_processes_give_the_local_bits(text: str, options: tuple[object, ...], tmp_path: Path) -> None:
    compiled(tmp_path, text)
    assert trained(tmp_path, *options) == trained(tmp_path, "--local", *options)


def test_where_leaves_are_cut_can_be_said_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    command = ("compile", tmp_path / "model.py", "-o", tmp_path / "build", *QUICK, *SCHEDULE)
    assert fxpipe(*command, "--microbatch-dims", "batch['scale']=none").code == 0
    wrong = fxpipe(*command, "--microbatch-dims", "batch['scale']")
    assert wrong.code == 1
    assert "is not NAME=DIM" in wrong.err
    wrong = fxpipe(*command, "--microbatch-dims", "batch['y']=1,batch['scale']=none")
    assert wrong.code == 1
    assert "its size differs" in wrong.err
