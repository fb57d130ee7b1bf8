"""Workers that run branches side by side, against rules by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import towers
from pipelines import pipeline_of
from torch import Tensor, nn
from torch.func import functional_call

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.schedule import of_plan

LR = 0.1


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=LR)


def compiled(model: nn.Module, **options: Any) -> Build:
    """With the left tower on worker 0, the right one on worker 1, and the head on worker 2."""
    options = {"schedule": "async", "cost": "analytic", "forward_at": ("right.0", "head")} | options
    return fxpipe.compile(model, towers.loss, towers.batch_of(4), workers=3, **options)


def test_forwards_of_both_towers_miss_one_update(tmp_path: Path) -> None:
    """In a chain the left tower would miss two: W(m+1) = W(m) − η·∇f, of the towers at W(m−1) and the head at W(m)."""
    torch.manual_seed(0)
    model, batches = towers.Towers(), [towers.batch_of(4) for _ in range(6)]
    history = [{name: value.detach().clone() for name, value in model.named_parameters()}]
    build = compiled(model, policy="stash", microbatches=1)
    for m, batch in enumerate(batches):
        seen = {name: history[m if name.startswith("head") else max(0, m - 1)][name] for name in history[m]}
        given = {name: value.clone().requires_grad_() for name, value in seen.items()}
        found = torch.autograd.grad(_loss(model, given, batch), list(given.values()))
        history.append({n: history[m][n] - LR * g for n, g in zip(given, found, strict=True)})
    build.save(tmp_path / "build")
    pipeline = pipeline_of(tmp_path / "build", sgd)
    pipeline.run(batches)
    state = pipeline.state_dict()
    for name, value in history[-1].items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def _loss(model: nn.Module, weights: dict[str, Tensor], batch: Any) -> Tensor:
    x, y, classes = batch
    return nn.functional.cross_entropy(functional_call(model, weights, (x, y)), classes)


class Tied(towers.Towers):
    """Both towers have the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left = towers.tower(3)
        for left, right in zip(self.left, self.right, strict=True):
            if isinstance(left, nn.Linear):
                right.weight, right.bias = left.weight, left.bias

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x[:, :3], y)


def test_towers_with_the_same_weights_are_a_chain() -> None:
    """The left tower's worker adds up the gradients of both."""
    torch.manual_seed(0)
    model, batch = Tied(), towers.batch_of(4)
    build = compiled(model, schedule="1f1b", microbatches=2)
    assert of_plan(build.plan).after == ()
    assert compare_with_eager(build, model, towers.loss, batch).largest < 1e-6
