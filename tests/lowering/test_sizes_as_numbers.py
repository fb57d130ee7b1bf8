"""Losses that use how many samples there are: a microbatch takes the whole batch's number, or compile says why not.

What uses it is multiplied by a leaf of the batch that is 0 in the first batch, where comparing with eager PyTorch shows
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from covering import covering
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.lowering.compare_with_eager import compare_with_eager

SAMPLES, CLASSES = 8, 5
Batch = tuple[Tensor, Tensor, Tensor, Tensor]
Step = Callable[[nn.Module, Batch], Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def batch(seed: int) -> Batch:
    """Samples, flags, classes, and 0 for all samples in the first batch."""
    torch.manual_seed(seed)
    flags = (torch.arange(SAMPLES) % 3 > 0).double()[torch.randperm(SAMPLES)]
    gates = torch.rand(SAMPLES).double() * (seed > 0)
    return torch.randn(SAMPLES, 6).double(), flags, torch.randint(0, CLASSES, (SAMPLES,)), gates


def errors(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - 1).square().mean(-1) * batch[3]


def slopes(model: nn.Module, batch: Batch) -> Tensor:
    """The gradient of a mean over the batch, at its samples."""
    x = batch[0].clone().requires_grad_()
    (found,) = torch.autograd.grad((model(x).square().mean(-1) * batch[3]).mean(), x, create_graph=True)
    return found


def binary(model: nn.Module, batch: Batch) -> Tensor:
    """Samples that are real, and others that are not."""
    found, labels = torch.cat([model(batch[0]), model(-batch[0])])[:, 0], batch[0].new_ones(len(batch[0]))
    each = F.binary_cross_entropy_with_logits(found, torch.cat([labels, 0 * labels]), reduction="none")
    return (each * batch[3].repeat(2)).mean()


def half(batch: Batch) -> Tensor:
    """1 for the first half of the samples."""
    count = len(batch[0]) // 2
    return torch.cat([torch.ones(count), torch.zeros(len(batch[0]) - count)])


def bounded(values: Tensor) -> Tensor:
    made = values.clone()
    made[values < 0.5] = 0
    return made


def held(model: nn.Module, batch: Batch) -> Tensor:
    """Errors that have a gradient only in a whole batch."""
    with torch.set_grad_enabled(len(batch[0]) == SAMPLES):
        return errors(model, batch).unsqueeze(-1)


def found_classes(batch: Batch) -> Tensor:
    return F.one_hot(batch[2], CLASSES).sum(0).clamp(min=1)


RIGHT: dict[str, Step] = {
    "sum by samples": lambda m, b: errors(m, b).sum() / len(b[0]),
    "sum by samples but one": lambda m, b: errors(m, b).sum() / (len(b[0]) - 1),
    "and a mean": lambda m, b: errors(m, b).sum() / (len(b[0]) - 1) + errors(m, b).mean(),
    "sum times a share": lambda m, b: errors(m, b).sum() * (1 / len(b[0])),
    "sum by a number": lambda m, b: errors(m, b).sum() / 4,
    "mean times samples": lambda m, b: errors(m, b).mean() * len(b[0]),
    "logarithm": lambda m, b: errors(m, b).mean() * math.log(len(b[0])),
    "at least half": lambda m, b: (errors(m, b) * b[1]).sum() / b[1].sum().clamp(min=len(b[0]) // 2),
    "what is missing": lambda m, b: errors(m, b).mean() * (1 + (len(b[0]) - b[1].sum()) / len(b[0])),
    "weights of classes": lambda m, b: (
        F.cross_entropy(m(b[0]), b[2], (len(b[0]) / (CLASSES * found_classes(b))).double(), reduction="none") * b[3]
    ).mean(),
    "a tensor of it": lambda m, b: errors(m, b).sum() / torch.tensor(float(len(b[0]))),
    "ones, added up": lambda m, b: errors(m, b).sum() / torch.ones(len(b[0])).double().sum(),
    "a power": lambda m, b: (errors(m, b) + 1).pow(len(b[0]) / SAMPLES).mean(),
    "a bound": lambda m, b: errors(m, b).clamp(max=len(b[0]) / SAMPLES).mean(),
    "filled": lambda m, b: (errors(m, b) * torch.full((len(b[0]),), float(len(b[0])))).mean(),
    "slopes of a mean": lambda m, b: (slopes(m, b).norm(dim=1) + 1).square().mean() + errors(m, b).mean(),
    "a distance along slopes": lambda m, b: (m(b[0] + slopes(m, b)) - m(b[0])).square().mean(),
    "a sum, a penalty and a mean": lambda m, b: (
        errors(m, b).sum() + 0.01 * (m[0].weight.square().sum() + m[2].weight.abs().sum()) - errors(m, b).mean() + 1
    ),
    "two numbers": lambda m, b: errors(m, b).mean() * (2 if len(b[0]) == SAMPLES else 1),
    "a share of all": lambda m, b: errors(m, b).mean() * (b[1].sum() / len(b[0])).sqrt(),
    "a share but one": lambda m, b: errors(m, b).mean() * (b[3].sum() / max(len(b[0]) - 1, 1)).exp(),
    "a share, and a count": lambda m, b: (
        errors(m, b).mean() * ((b[3].sum() / len(b[0])).view(1).exp().sum() + b[3].sum().exp())
    ),
    "a count of classes times samples": lambda m, b: errors(m, b).mean() * (b[2].sum() * len(b[0])).remainder(7),
    "a sum and a mean": lambda m, b: errors(m, b).sum() + errors(m, b).square().mean(),
    "filled with a sum": lambda m, b: errors(m, b).mean() + torch.zeros(()).double().fill_(errors(m, b).sum()),
    "written over by a sum": lambda m, b: errors(m, b).mean() + errors(m, b).mean().clone().copy_(errors(m, b).sum()),
    "labels of two kinds": binary,
    "a table of counts": lambda m, b: errors(m, b).mean() * torch.arange(20.0).sin()[found_classes(b)].sum(),
    "whether there are any": lambda m, b: errors(m, b).mean() * (b[1] * b[3] > 0.9).long().sum().bool(),
    "written where it is less": lambda m, b: (errors(m, b) * bounded(b[3])).mean(),
    "each its own": lambda m, b: -(m(b[0]).log_softmax(-1)[torch.arange(len(b[0])), b[2]] * b[3]).mean(),
}

SAID: dict[str, tuple[str, Step]] = {
    "the first four": ("does not have as many rows", lambda m, b: errors(m, b)[:4].mean()),
    "a narrow view": ("does not have as many rows", lambda m, b: errors(m, b).narrow(0, 0, 4).mean()),
    "the first part": ("does not have as many rows", lambda m, b: errors(m, b).split(4)[0].mean()),
    "places": ("depends on how many samples", lambda m, b: (errors(m, b) * torch.arange(float(len(b[0])))).mean()),
    "a softmax of ones": (
        "depends on how many samples",
        lambda m, b: (errors(m, b) * torch.ones(len(b[0])).softmax(0)).sum(),
    ),
    "ones, counted": (
        "depends on how many samples",
        lambda m, b: (errors(m, b) * torch.ones(len(b[0])).cumsum(0)).sum(),
    ),
    "from 0 to 1": ("number that depends", lambda m, b: (errors(m, b) * torch.linspace(0, 1, len(b[0]))).mean()),
    "rolled": ("number that depends", lambda m, b: (m(b[0].roll(len(b[0]) // 4, 1)).mean(-1) * b[3]).mean()),
    "the largest": (
        "number that depends",
        lambda m, b: errors(m, b).mean() * m[0].weight.flatten().topk(len(b[0])).values.mean(),
    ),
    "the first half": ("depends on how many samples", lambda m, b: (errors(m, b) * half(b)).mean()),
    "every so many": (
        "number that depends",
        lambda m, b: (b[0][:, :: len(b[0]) // 4 + 3].sum(-1) * errors(m, b)).mean(),
    ),
    "filled at classes": (
        "index_fill",
        lambda m, b: (torch.zeros(CLASSES, len(b[0])).index_fill(0, b[2], 1.0).sum(0) * errors(m, b)).mean(),
    ),
    "a gradient for many": ("computes its gradient differently", lambda m, b: (m(b[0]) * held(m, b)).mean()),
    "a branch": (
        "the step on the whole batch differs from here on",
        lambda m, b: errors(m, b).mean() + (errors(m, b).square().mean() if len(b[0]) < SAMPLES else 0),
    ),
    "a loop": (
        "has another loss",
        lambda m, b: sum((errors(m, b).square().mean() for _ in range(len(b[0]))), errors(m, b).mean()),
    ),
}


def compiled(step: Step, microbatches: int) -> Build:
    return fxpipe.compile(net(), step, batch(0), workers=2, schedule="1f1b", cost="analytic", microbatches=microbatches)


@pytest.mark.parametrize(("name", "microbatches"), covering(RIGHT, [SAMPLES, 2], strength=1))
def test_the_whole_batch_s_number_is_taken(name: str, microbatches: int) -> None:
    build = compiled(RIGHT[name], microbatches)
    assert not build.warnings
    agreement = compare_with_eager(build, net(), RIGHT[name], batch(1))
    assert not agreement.not_compared
    assert agreement.largest < 1e-6


@pytest.mark.parametrize("name", SAID)
def test_what_cannot_be_is_said(name: str) -> None:
    why, step = SAID[name]
    (warning,) = compiled(step, 2).warnings
    assert "checked on the first batch, and not proved for others" in warning
    assert why in warning
