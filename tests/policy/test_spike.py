"""Spike-compensated updates against the formula, simulated in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer, RMSprop
from torch.testing import assert_close

from fxpipe.errors import PolicyError
from fxpipe.policy.optimizers.spike import SpikeCompensation

STEPS = 20


def weights(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2), (4,), (5,))
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def gradient(weight: Tensor, step: int) -> Tensor:
    return torch.cos(weight.detach() * 3 + step)


def rate(step: int) -> float:
    return 0.1 / (1 + step)


def train(optimizer: Optimizer, compensation: SpikeCompensation | None) -> None:
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
            for parameter in group["params"]:
                parameter.grad = gradient(parameter, step)
        optimizer.step()
        if compensation:
            compensation.after_step()


def simulated(w: Tensor, delay: int, gamma: float, decay: float, maximize: bool) -> Tensor:
    """w ← w − lr·(a·buf + b·g), by the letter."""
    w = w.detach().clone()
    a, b = gamma**delay, (1 - gamma**delay) / (1 - gamma)
    buf = torch.zeros_like(w)
    for step in range(STEPS):
        g = (-1 if maximize else 1) * gradient(w, step) + decay * w
        buf = gamma * buf + g
        w = w - rate(step) * (a * buf + b * g)
    return w


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_it_follows_the_formula(decay: float, maximize: bool, foreach: bool) -> None:
    parameters = weights()
    delays = [2, 0, 5]
    expected = [simulated(w, d, 0.9, decay, maximize) for w, d in zip(parameters, delays, strict=True)]
    optimizer = SGD(parameters, lr=0.1, momentum=0.9, weight_decay=decay, maximize=maximize, foreach=foreach)
    train(optimizer, SpikeCompensation(optimizer, dict(zip(parameters, delays, strict=True))))
    assert_close([p.detach() for p in parameters], expected)


def test_each_group_has_its_own_momentum() -> None:
    parameters = weights()[:2]
    expected = [simulated(w, 3, gamma, 0.0, False) for w, gamma in zip(parameters, (0.5, 0.9), strict=True)]
    groups = [{"params": [p], "momentum": gamma} for p, gamma in zip(parameters, (0.5, 0.9), strict=True)]
    optimizer = SGD(groups, lr=0.1)
    train(optimizer, SpikeCompensation(optimizer, dict.fromkeys(parameters, 3)))
    assert_close([p.detach() for p in parameters], expected)


def test_without_delay_it_is_plain_bit_for_bit() -> None:
    plain, compensated = weights(torch.float32), weights(torch.float32)
    train(SGD(plain, lr=0.1, momentum=0.9, weight_decay=0.1), None)
    optimizer = SGD(compensated, lr=0.1, momentum=0.9, weight_decay=0.1)
    train(optimizer, SpikeCompensation(optimizer, dict.fromkeys(compensated, 0)))
    assert all(torch.equal(a, b) for a, b in zip(plain, compensated, strict=True))


def test_a_gradient_acts_at_once_as_much_as_it_would_have_by_now() -> None:
    """One gradient of one, then none: after D more updates, plain SGD with it in time stands where the spike did."""
    [late], [timely] = ([torch.zeros(1, dtype=torch.float64, requires_grad=True)] for _ in range(2))
    optimizer, plain = SGD([late], lr=0.1, momentum=0.9), SGD([timely], lr=0.1, momentum=0.9)
    compensation = SpikeCompensation(optimizer, {late: 4})
    for step in range(5):
        timely.grad = torch.full_like(timely, float(step == 0))
        plain.step()
    late.grad = torch.ones_like(late)
    optimizer.step()
    compensation.after_step()
    assert_close(late, timely)


def test_the_momentum_is_sgd_s_own_and_gradients_are_not_touched() -> None:
    [parameter] = weights()[:1]
    optimizer = SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.1)
    compensation = SpikeCompensation(optimizer, {parameter: 2})
    parameter.grad = gradient(parameter, 0)
    optimizer.step()
    buffer, grad = optimizer.state[parameter]["momentum_buffer"].clone(), parameter.grad.clone()
    compensation.after_step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], buffer)
    assert torch.equal(parameter.grad, grad)


def test_a_parameter_without_a_gradient_stays() -> None:
    used, paused, unused = weights()
    optimizer = SGD([used, paused, unused], lr=0.1, momentum=0.9)
    compensation = SpikeCompensation(optimizer, {used: 1, paused: 1, unused: 1})
    used.grad, paused.grad = gradient(used, 0), gradient(paused, 0)
    for _ in range(2):
        before = [p.detach().clone() for p in (used, paused, unused)]
        optimizer.step()
        compensation.after_step()
        paused.grad = None
    assert [torch.equal(p, w) for p, w in zip((used, paused, unused), before, strict=True)] == [False, True, True]


def test_momentum_that_a_scheduler_took_away_needs_nothing() -> None:
    [parameter] = weights()[:1]
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    compensation = SpikeCompensation(optimizer, {parameter: 2})
    for momentum in (0.9, 0.0):
        optimizer.param_groups[0]["momentum"] = momentum
        parameter.grad = gradient(parameter, 0)
        optimizer.step()
        before = parameter.detach().clone()
        compensation.after_step()
    assert torch.equal(parameter, before)


class Mine(SGD):
    pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(SGD, lr=0.1), "needs momentum, and SGD has none"),
        (partial(SGD, lr=0.1, momentum=0.9, nesterov=True), "SGD has nesterov"),
        (partial(SGD, lr=0.1, momentum=0.9, dampening=0.1), "SGD has dampening"),
        (partial(RMSprop, momentum=0.9), "not for RMSprop"),
        (Adam, "not for Adam"),
        (partial(Mine, lr=0.1, momentum=0.9), "not for Mine"),
    ],
)
def test_other_optimizers_are_refused(make: Callable[[list[Tensor]], Optimizer], said: str) -> None:
    with pytest.raises(PolicyError, match=said) as caught:
        SpikeCompensation(make(weights()), {})
    assert "+sc" in str(caught.value.hint)


def test_the_group_that_is_refused_is_named() -> None:
    first, second, _ = weights()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "momentum": 0.0}]
    with pytest.raises(PolicyError, match="SGD in parameter group 1 has none"):
        SpikeCompensation(SGD(groups, lr=0.1, momentum=0.9), {})
