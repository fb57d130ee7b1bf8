"""Updates with adaptive braking against the formula, computed in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop
from torch.testing import assert_close

from fxpipe.errors import PolicyError
from fxpipe.policy.optimizers.braking import STRENGTH, Braking, cosine
from fxpipe.task.several_optimizers import SeveralOptimizers

STEPS = 8
Kind = Callable[..., Optimizer]


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2), (4, 4), (2, 5))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def gradient(weight: Tensor, step: int) -> Tensor:
    return torch.cos(weight.detach() * 3 + step)


def train(optimizer: Optimizer, parameters: list[Tensor], braked: bool = True) -> None:
    braking = Braking(optimizer, {})
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = gradient(parameter, step)
        if braked:
            braking.before_step()
        optimizer.step()
        if braked:
            braking.after_step()


def simulated(kind: Kind, start: Tensor, velocity: str) -> Tensor:
    """By the letter, for one weight: the optimizer by itself gets the scaled gradient."""
    w = start.detach().clone().requires_grad_()
    optimizer = kind([w], lr=0.1)
    for step in range(STEPS):
        g = gradient(w, step)
        if step:
            alignment = cosine_similarity(g.flatten(), optimizer.state[w][velocity].flatten(), dim=0, eps=0)
            g = g - STRENGTH * alignment * g
        w.grad = g
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize(
    ("kind", "velocity"),
    [
        (partial(SGD, momentum=0.9, weight_decay=0.2), "momentum_buffer"),
        (partial(SGD, momentum=0.9, nesterov=True), "momentum_buffer"),
        (partial(RMSprop, momentum=0.8), "momentum_buffer"),
        (partial(AdamW, weight_decay=0.1), "exp_avg"),
        (NAdam, "exp_avg"),
        (Muon, "momentum_buffer"),
    ],
)
def test_it_follows_the_formula(kind: Kind, velocity: str) -> None:
    parameters = weights()
    expected = [simulated(kind, w, velocity) for w in parameters]
    train(kind(parameters, lr=0.1), parameters)
    assert_close([p.detach() for p in parameters], expected)
    plain = weights()
    train(kind(plain, lr=0.1), plain, braked=False)
    assert not torch.allclose(plain[0], parameters[0], rtol=1e-3, atol=0)


def test_each_of_several_optimizers_has_its_own_velocity() -> None:
    first, second, _ = weights()
    kinds: tuple[Kind, Kind] = (partial(SGD, momentum=0.9), Adam)
    expected = [
        simulated(kind, weight, velocity)
        for kind, weight, velocity in zip(kinds, (first, second), ("momentum_buffer", "exp_avg"), strict=True)
    ]
    train(SeveralOptimizers([kinds[0]([first], lr=0.1), kinds[1]([second], lr=0.1)]), [first, second])
    assert_close([first.detach(), second.detach()], expected)


def test_where_nothing_moves_gradients_stay() -> None:
    still, unused, _ = weights()
    optimizer = SGD([still, unused], lr=0.1, momentum=0.9)
    braking = Braking(optimizer, {})
    still.grad = torch.zeros_like(still)
    for _ in range(2):
        braking.before_step()
        optimizer.step()
        braking.after_step()
    still.grad = gradient(still, 0)
    braking.before_step()
    assert torch.equal(still.grad, gradient(still, 0))
    assert unused.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_the_cosine_in_other_dtypes(dtype: torch.dtype) -> None:
    one = torch.tensor([300.0, -400.0, 0.0]).to(dtype)  # in float16 the sum of squares overflows
    other = torch.tensor([300.0, 0.0, 400.0]).to(dtype)
    assert float(cosine(one, other)) == pytest.approx(0.36)
    assert float(cosine(one, -one)) == pytest.approx(-1.0)
    assert float(cosine(one, torch.zeros_like(one))) == 0.0


def test_nothing_is_read_from_the_device() -> None:
    """On `meta` every read of a value fails."""
    parameter = torch.randn(4, 3, device="meta", requires_grad=True)
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    braking = Braking(optimizer, {})
    for _ in range(2):
        parameter.grad = torch.randn(4, 3, device="meta")
        braking.before_step()
        optimizer.step()
        braking.after_step()


class Own(Optimizer):
    """Its groups say that it has momentum, and its state does not say where."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                speed = self.state[parameter].get("speed", 0.0)
                self.state[parameter]["speed"] = speed = group["momentum"] * speed + parameter.grad
                parameter -= group["lr"] * speed


def test_without_momentum_it_is_refused() -> None:
    with pytest.raises(PolicyError, match="adaptive braking does nothing without momentum, and SGD has none") as caught:
        Braking(SGD(weights(), lr=0.1), {})
    assert "+brake" in str(caught.value.hint)


def test_an_unknown_velocity_is_refused_after_the_first_step() -> None:
    parameters = weights()
    with pytest.raises(PolicyError, match="Own keeps none as 'momentum_buffer' or 'exp_avg'") as caught:
        train(Own(parameters, lr=0.1), parameters)
    assert "state[parameter]['momentum_buffer']" in str(caught.value.hint)
