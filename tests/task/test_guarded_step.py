"""What a step of an optimizer may use of a model that it can reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from fxpipe.optimizer.hook import make_optimizer
from fxpipe.task.model_view import of_parameters
from fxpipe.task.one_optimizer import OptimizerRefused


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mine, self.other, self.teacher = (nn.Linear(2, 2) for _ in range(3))
        self.teacher.requires_grad_(False)
        self.norm = nn.BatchNorm1d(2, affine=False)


def stepped(after: Callable[[nn.Module, Any], object]) -> Optimizer:
    """After a step of a worker that owns `mine`, whose hook gets a view of the model."""

    def make(named: Any, model: nn.Module) -> Optimizer:
        made = SGD([p for _, p in named], lr=0.1)
        made.register_step_post_hook(lambda *_: after(model, made))
        return made

    named = [(f"mine.{name}", p) for name, p in nn.Linear(2, 2).named_parameters()]
    optimizer = make_optimizer(of_parameters(make, Net), named)
    assert optimizer is not None
    optimizer.step()
    return optimizer


@torch.no_grad()
def followed(model: Any, optimizer: Any) -> None:
    for theirs, own in zip(model.teacher.parameters(), model.mine.parameters(), strict=True):
        theirs.data.lerp_(own.data, 0.1)


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (followed, "followed uses teacher.weight"),
        (lambda m, o: m.teacher.weight.data.mul_(2), "uses teacher.weight"),
        (lambda m, o: m.norm.running_mean.add_(1), "uses norm.running_mean"),
        (lambda m, o: float(m.norm.running_mean.sum()), "uses norm.running_mean"),
        (lambda m, o: m.other(torch.ones(1, 2)), "uses other"),
        (lambda m, o: m.mine.weight.data.add_(m.other.weight.data), "uses other.weight"),
        (lambda m, o: m.other.state_dict(), "takes the state of a Linear"),
        (lambda m, o: setattr(m, "rate", 1), "sets rate of a Net"),
    ],
)
def test_what_no_worker_would_see_is_refused(after: Callable[[Any, Any], object], what: str) -> None:
    with pytest.raises(OptimizerRefused, match=what) as caught:
        stepped(after)
    assert str(caught.value.where).startswith("test_guarded_step.py:")


@pytest.mark.parametrize(
    "after",
    [
        lambda m, o: [p.data.clamp_(-0.1, 0.1) for p in m.parameters() if p.requires_grad],
        lambda m, o: torch._foreach_mul_([p.data for p in m.other.parameters()], 0.5),
        lambda m, o: m.mine(torch.ones(1, 2)),
        lambda m, o: [m.training, m.other.weight.shape, m.norm.running_mean.dtype],
    ],
)
def test_a_workers_own_parameters_may_be_used(after: Callable[[Any, Any], object]) -> None:
    made = stepped(after)
    assert all(parameter.isfinite().all() for parameter in made.param_groups[0]["params"])


def test_a_model_that_a_hook_reaches_by_itself_is_guarded() -> None:
    model = Net()

    def make(named: Any) -> Optimizer:
        made = SGD([p for _, p in named], lr=0.1)
        made.register_step_post_hook(lambda *_: model.teacher.weight.data.mul_(2))
        return made

    made = make_optimizer(make, [("mine.weight", nn.Parameter(torch.ones(2, 2)))])
    assert made is not None
    StepLR(made, 1)
    with pytest.raises(OptimizerRefused, match=r"uses teacher\.weight"):
        made.step()
