"""From a model file to trained weights: microbatches whose losses make the whole batch's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.nn.functional as functional
from commands import QUICK, fxpipe
from safetensors.torch import load_file

from fxpipe.task.model_file import load_task

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
EVALUATED = (
    HOOKED
    + """

def eval_data():
    generator = torch.Generator().manual_seed(3)
    for samples, kept in ((6, 1), (6, 3), (2, 4)):
        targets = torch.randint(0, 5, (samples, 4), generator=generator)
        targets[:, kept:] = -100
        yield {"x": torch.randn(samples, 4, 6, generator=generator), "y": targets, "scale": torch.ones(6)}


def metrics(model, batch):
    right = (model(batch["x"]).argmax(-1) == batch["y"]).sum() / valid(batch).sum()
    return {"loss": loss(model, batch), "right": right}
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


@pytest.mark.parametrize("captured", [True, False])
def test_metrics_are_means_over_all_that_counts(captured: bool, tmp_path: Path) -> None:
    """In the pipeline or in one process: batches with many tokens count more, the last one is smaller."""
    text = EVALUATED if captured else EVALUATED.replace("loss(model, batch),", "loss(model, batch).item(),")
    compiled(tmp_path, text)
    result = fxpipe("run", tmp_path / "build", "--steps", 3, "--out", tmp_path / "out", "--json", "--local")
    assert result.code == 0, result.err
    task = load_task(tmp_path / "model.py")
    model = task.model()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    losses, right, count = 0.0, 0, 0
    for batch in task.eval_data():
        found = model(batch["x"]).flatten(0, 1)
        losses += float(functional.cross_entropy(found, batch["y"].flatten(), reduction="sum"))
        right += int((found.argmax(-1) == batch["y"].flatten()).sum())
        count += int((batch["y"] >= 0).sum())
    assert count == 6 + 18 + 8
    expected = {"loss": losses / count, "right": right / count}
    assert json.loads(result.out)["evaluation"] == pytest.approx(expected, rel=1e-5)


def test_a_hook_that_cannot_weigh_an_evaluation_is_refused_by_compile(tmp_path: Path) -> None:
    text = EVALUATED.replace('"y": targets, "scale": torch.ones(6)}\n\n\ndef metrics', '"z": 0}\n\n\ndef metrics')
    assert text != EVALUATED
    (tmp_path / "model.py").write_text(text)
    result = fxpipe("compile", tmp_path / "model.py", "-o", tmp_path / "build", *QUICK, *SCHEDULE)
    assert result.code == 1
    assert "loss_weight(batch) raised KeyError: 'y'" in result.err


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
