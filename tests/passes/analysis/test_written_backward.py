"""Gradient hooks and the backward of an autograd.Function: linear, and the same for each sample, or compile warns.

What they change is multiplied by a leaf of the batch that is 0 in the first batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import fxpipe
from fxpipe.build.build import Build
from fxpipe.ir.program import WRITTEN, info
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.tracing.capture import capture

SAMPLES = 8
Batch = tuple[Tensor, Tensor]
Step = Callable[[nn.Module, Batch], Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def batch(seed: int) -> Batch:
    torch.manual_seed(seed)
    return torch.randn(SAMPLES, 6).double(), torch.rand(SAMPLES).double() * (seed > 0)


def function(forward: Callable[..., Tensor], backward: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of autograd whose backward gets the gradient and what forward got."""

    class Written(Function):
        @staticmethod
        def forward(ctx: Any, *args: Tensor) -> Tensor:
            ctx.save_for_backward(*args)
            return forward(*args)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return backward(gradient, *ctx.saved_tensors)

    return Written.apply


def of(*args: Any) -> Step:
    """A step whose features go through a function."""
    made = function(*args)
    return lambda m, b: (m[2](made(m[:2](b[0]))).square().mean(-1) * b[1]).mean() + m(b[0]).square().mean()


def hooked(hook: Callable[[Tensor], Tensor | None]) -> Step:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        features = model[:2](batch[0])
        features.register_hook(hook)
        return (model[2](features).square().mean(-1) * batch[1]).mean() + model(batch[0]).square().mean()

    return step


def own_linear(model: nn.Module, batch: Batch) -> Tensor:
    linear = function(lambda x, w, b: x @ w.t() + b, lambda g, x, w, b: (g @ w, g.t() @ x, g.sum(0)))
    made = linear(model[:2](batch[0]), model[2].weight, model[2].bias)
    return (made.square().mean(-1) * batch[1]).mean()


def erased(gradient: Tensor, x: Tensor) -> Tensor:
    made = gradient.clone()
    made[x < 0] = 0
    return made


RIGHT: dict[str, Step] = {
    "straight through": of(torch.round, lambda g, x: g),
    "reversed": of(torch.clone, lambda g, x: -0.5 * g),
    "within bounds": of(torch.sign, lambda g, x: torch.where(x.abs() < 0.5, g, torch.zeros_like(g))),
    "masked": of(torch.relu, lambda g, x: g.masked_fill(x < 0, 0.0)),
    "erased": of(torch.relu, erased),
    "swish": of(lambda x: x * x.sigmoid(), lambda g, x: g * x.sigmoid() * (1 + x * (1 - x.sigmoid()))),
    "a linear layer": own_linear,
    "a hook that doubles": hooked(lambda g: g * 2),
    "a hook that reads": hooked(lambda g: None),
}


def saved(model: nn.Module, batch: Batch) -> Tensor:
    """Its backward gives what forward got, and calls nothing."""
    kept = function(lambda x, s: x.clone(), lambda g, x, s: (s, None))
    made = kept(model(batch[0]), batch[1].unsqueeze(-1).expand(-1, 5))
    return (made.square().mean(-1) * batch[1]).mean() + model(batch[0]).square().mean()


SAID: dict[str, tuple[str, Step]] = {
    "over samples": ("number that depends", of(torch.clone, lambda g, x: g / len(x))),
    "less the mean": ("mean over gradients", of(torch.clone, lambda g, x: g - g.mean(0))),
    "clipped": ("clamp is not known to be linear", of(torch.clone, lambda g, x: g.clamp(-1e-3, 1e-3))),
    "a hook over samples": ("number that depends", hooked(lambda g: g / len(g))),
    "a hook that normalises": ("not known to be linear", hooked(lambda g: F.normalize(g, dim=1, eps=1e-9))),
    "a hook of one number": ("mul is not known to be linear", hooked(lambda g: g * g.sum())),
}


def compiled(step: Step, microbatches: int = 2) -> Build:
    return fxpipe.compile(net(), step, batch(0), workers=2, schedule="1f1b", cost="analytic", microbatches=microbatches)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_linear_for_each_sample_is_derived(name: str) -> None:
    build = compiled(RIGHT[name])
    assert not build.warnings
    agreement = compare_with_eager(build, net(), RIGHT[name], batch(1))
    assert not agreement.not_compared
    assert agreement.largest < 1e-6


@pytest.mark.parametrize("name", SAID)
def test_what_is_not_is_said(name: str) -> None:
    why, step = SAID[name]
    (warning,) = compiled(step).warnings
    assert "not proved for others: the backward that a hook or an autograd.Function has" in warning
    assert "test_written_backward.py" in warning
    assert why in warning


def test_what_forward_has_saved_is_no_gradient() -> None:
    (warning,) = compiled(saved).warnings
    assert "gives a gradient that does not depend on the loss" in warning


def test_the_user_s_lines_are_marked() -> None:
    program = capture(net(), hooked(lambda g: g / len(g)), batch(1))
    (written,) = [n for n in program if WRITTEN in n.meta]
    assert info(written).phase == "B"
    assert "hooked(lambda g: g / len(g))" in written.meta[WRITTEN]
