"""A list of optimizers: each part has its own rule of prediction, what it cannot do is refused by its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fxpipe
from fxpipe.costs.optimizer import optimizer_costs
from fxpipe.errors import PolicyError, TaskError

WIDTH = 8
Named = list[tuple[str, nn.Parameter]]
Made = Callable[[Named], Any]


class Scale(nn.Module):
    """No matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def model() -> nn.Sequential:
    """Worker 0 and 2 own both kinds, worker 1 a matrix alone, worker 3 none."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), Scale()]
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (net(x) - y).square().mean()


def two(matrices: Callable[[list[nn.Parameter]], Optimizer], rest: Callable[[list[nn.Parameter]], Optimizer]) -> Made:
    def make(named: Named) -> Any:
        own = [p for _, p in named if p.dim() == 2], [p for _, p in named if p.dim() != 2]
        return [kind(given) for kind, given in zip((matrices, rest), own, strict=True) if given]

    return make


def halving(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.8**step)


@functools.cache
def built() -> fxpipe.Build:
    at = ["1", "2", "3"]
    return fxpipe.compile(
        model(),
        loss,
        (torch.ones(12, WIDTH), torch.ones(12, WIDTH)),
        workers=4,
        microbatches=1,
        forward_at=at,
        backward_at=at,
        schedule="async",
        policy="latest",
        cost="analytic",
        optimizer=two(Muon, AdamW),
        lr_scheduler=halving,
    )


def test_each_part_is_predicted_by_its_own_rule() -> None:
    pipeline = built().local(optimizer=two(Muon, NAdam), policy="spectrain")
    rules = [e.store.versions.predictions.predictor.rules for e in pipeline.executors]
    assert rules == [("last-update", "nadam"), ("last-update",), ("last-update", "nadam"), ("nadam",)]


def test_what_a_part_cannot_do_is_refused_by_its_name() -> None:
    with pytest.raises(PolicyError, match="SGD in parameter group 1 has none"):
        built().local(optimizer=two(Muon, lambda p: SGD(p, lr=0.1)), policy="latest+ef")


def test_an_empty_part_would_leave_a_worker_untrained() -> None:
    def careless(named: Named) -> Any:
        return [Muon([p for _, p in named if p.dim() == 2]), AdamW([p for _, p in named if p.dim() != 2])]

    with pytest.raises(TaskError, match="only those of its worker 1: an optimizer over an empty list") as caught:
        built().local(optimizer=careless, policy="latest")
    assert "if matrices else []" in str(caught.value.hint)


def test_the_memory_of_every_parts_state_is_counted() -> None:
    named = [(name, p.detach()) for name, p in model().named_parameters()]
    matrices = sum(p.nbytes for _, p in named if p.dim() == 2)
    rest = sum(p.nbytes for _, p in named) - matrices
    found = optimizer_costs(named, two(Muon, AdamW), timed=False, bandwidth=1.0).state_bytes
    steps = 3 * 4  # AdamW's count of each tensor's updates
    assert found * (matrices + rest) == pytest.approx(matrices + 2 * rest + steps, abs=steps)
