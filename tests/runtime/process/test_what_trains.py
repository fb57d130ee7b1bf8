"""Code that freezes or thaws parameters while a build trains is refused by the parameters' names, wherever it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import fxpipe as command
from torch import nn
from torch.optim import SGD

import fxpipe
from fxpipe.errors import TaskError

MODEL = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self[0].requires_grad_(False)

{hooks}
def loss(model, batch):
    return model(batch).square().mean()

def train_data():
    return [torch.ones(4, 3)] * 9
"""
GLOBAL = """
NET = Net()
def model():
    return NET
def on_step(step, loss, run):
    NET[0].weight.requires_grad = step > 2
"""
FACTORY = """
held = {}
def model():
    held["net"] = Net()
    return held["net"]
def optimizer(named_parameters, model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
def on_epoch(epoch, run):
    held["net"][0].requires_grad_(True)
"""
LIVE = """
def model():
    return Net()
PARAMETERS = {}
def optimizer(named_parameters):
    PARAMETERS.update(named_parameters)
    return torch.optim.SGD(PARAMETERS.values(), lr=0.1)
def on_step(step, loss, run):
    PARAMETERS["2.bias"].requires_grad_(step < 3)
"""
HOOK = """
def model():
    return Net()
def optimizer(named_parameters):
    named = dict(named_parameters)
    named["2.weight"].requires_grad = False
    return torch.optim.SGD(named.values(), lr=0.1)
"""
EVALUATES = """
EVALUATED = Net()
def model():
    return Net()
def on_step(step, loss, run):
    EVALUATED.requires_grad_(False)
    other = Net().requires_grad_(True)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (GLOBAL, "on_step() changes requires_grad of 0.weight, but"),
        (FACTORY, "on_epoch() changes requires_grad of 0.weight, 0.bias, but"),
        (LIVE, "on_step() changes requires_grad of 2.bias, but"),
        (HOOK, "optimizer() changes requires_grad of 2.weight, but"),
        (EVALUATES, ""),
    ],
    ids=["global", "factory", "live", "hook", "evaluates"],
)
def test_hooks_of_a_model_file(code: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(hooks=code))
    made = command("compile", tmp_path / "model.py", "-n", 2, "--cost", "analytic", "-o", tmp_path / "build")
    assert made.code == 0, made.err
    run = command("run", tmp_path / "build", "--local", "--epochs", 2, "--out", tmp_path / "out")
    assert (run.code, said in run.err) == (1 if said else 0, True), run.err
    if said:
        assert "compiling decides which parameters are trained" in run.err
        assert "fxpipe run BUILD --resume CHECKPOINT" in run.err


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    return model


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def sgd(named: Any) -> SGD:
    return SGD([p for _, p in named], lr=0.1)


WAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "thawed": (lambda model: model[0].requires_grad_(True), "0.weight, 0.bias"),
    "frozen": (lambda model: model[2].bias.requires_grad_(False), "2.bias"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", ["compiled", "eval", "model"])
def test_a_loop_of_ones_own(way: str, given: str, tmp_path: Path) -> None:
    change, names = WAYS[way]
    model, batch = net(), torch.ones(4, 3)
    build = fxpipe.compile(model, loss, batch, workers=2, cost="analytic")
    options: dict[str, Any] = {"optimizer": sgd}
    if given == "model":
        build = fxpipe.load(build.save(tmp_path / "build").folder)
        options["model"] = lambda: model
    if given == "eval":
        model.eval()
    with build.local(**options) as pipeline:
        pipeline.step(batch)
        change(model)
        with pytest.raises(TaskError, match=f"code between the steps changes requires_grad of {names}, but compiling"):
            pipeline.step(batch)
        pipeline.save(tmp_path / "saved")  # as the error says
    assert (tmp_path / "saved").is_dir()


def test_what_changes_before_the_pipeline_is_made_counts() -> None:
    model, batch = net(), torch.ones(4, 3)
    build = fxpipe.compile(model, loss, batch, workers=2, cost="analytic")
    model[0].requires_grad_(True)
    with build.local(optimizer=sgd) as pipeline, pytest.raises(TaskError, match=r"0\.weight, 0\.bias"):
        pipeline.step(batch)


def test_the_compiled_model_may_evaluate() -> None:
    model, batch = net(), torch.ones(4, 3)
    with fxpipe.compile(model, loss, batch, workers=2, cost="analytic").local(optimizer=sgd) as pipeline:
        model.requires_grad_(False)
        pipeline.step(batch)
        assert pipeline.fed == 1
