"""Predicted weights against formulas written by hand, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.testing import assert_close

from fxpipe.policy.predict import Predictor

Make = Callable[[list[Tensor]], Optimizer]


class Sign(Optimizer):
    """An optimizer of the user's own, not known to fxpipe."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


def train(optimizer: Optimizer, predictor: Predictor, updates: int = 3) -> None:
    """Updates with gradients that have a direction of their own each time."""
    for update in range(updates):
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                parameter.grad = torch.cos(parameter.detach() + update + number)
        predictor.before_step()
        optimizer.step()
        predictor.observe()


def trained(make: Make, updates: int = 3) -> tuple[Predictor, Optimizer, list[Tensor]]:
    parameters = weights((3, 2), (4,))
    optimizer = make(parameters)
    predictor = Predictor(optimizer, parameters)
    train(optimizer, predictor, updates)
    return predictor, optimizer, [p.detach().clone() for p in parameters]


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum(nesterov: bool) -> None:
    predictor, optimizer, now = trained(partial(SGD, lr=0.1, momentum=0.9, nesterov=nesterov))
    assert predictor.rule == "momentum"
    for parameter, w, ahead in zip(predictor.parameters, now, predictor.predict(4), strict=True):
        assert_close(ahead, w - 4 * 0.1 * optimizer.state[parameter]["momentum_buffer"])


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("kind", "decoupled"), [(Adam, 0.0), (AdamW, 0.2)])
def test_adam(kind: Callable[..., Optimizer], decoupled: float, amsgrad: bool) -> None:
    predictor, optimizer, now = trained(
        partial(kind, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, amsgrad=amsgrad)
    )
    assert predictor.rule == "adam"
    for parameter, w, ahead in zip(predictor.parameters, now, predictor.predict(4), strict=True):
        state = optimizer.state[parameter]
        m = state["exp_avg"] / (1 - 0.8**3)
        v = state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"] / (1 - 0.9**3)
        assert_close(ahead, w - 4 * 0.1 * (m / (v.sqrt() + 1e-3) + decoupled * w))


OPTIMIZERS: dict[str, tuple[Make, str]] = {
    "momentum": (partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.3), "momentum"),
    "momentum-maximize": (partial(SGD, lr=0.1, momentum=0.9, maximize=True), "momentum"),
    "adam": (partial(Adam, lr=0.1, weight_decay=0.1), "adam"),
    "adam-maximize": (partial(Adam, lr=0.1, maximize=True), "adam"),
    "amsgrad": (partial(Adam, lr=0.1, amsgrad=True, betas=(0.5, 0.5)), "adam"),
    "adamw-no-decay": (partial(AdamW, lr=0.1, weight_decay=0.0), "adam"),
    "tensor-lr": (partial(Adam, lr=torch.tensor(0.1, dtype=torch.float64), foreach=False), "adam"),
    "sgd": (partial(SGD, lr=0.1), "last-update"),
    "rmsprop": (partial(RMSprop, lr=0.1), "last-update"),
    "own": (Sign, "last-update"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_step_ahead_repeats_the_last_update(name: str) -> None:
    """True of every rule while lr stands still (nesterov and decoupled decay aside, see the docstring)."""
    make, rule = OPTIMIZERS[name]
    predictor, optimizer, before = trained(make)
    assert predictor.rule == rule
    train(optimizer, predictor, updates=1)
    for live, w, ahead in zip(predictor.parameters, before, predictor.predict(2), strict=True):
        assert_close(ahead, live + 2 * (live - w))
        assert not torch.equal(live, w)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_live_is_touched(name: str) -> None:
    predictor, optimizer, now = trained(OPTIMIZERS[name][0])
    state = [{k: torch.as_tensor(v).clone() for k, v in s.items()} for s in optimizer.state.values()]
    once = predictor.predict(3)
    for ahead, live, w in zip(once, predictor.parameters, now, strict=True):
        assert ahead.data_ptr() != live.data_ptr()
        assert not ahead.requires_grad
        assert torch.equal(live, w)
    assert_close([dict(s) for s in optimizer.state.values()], state)
    assert_close(predictor.predict(3), once, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_live_where_there_is_nothing_to_predict(name: str) -> None:
    predictor, _, _ = trained(OPTIMIZERS[name][0])
    assert are_live(predictor.predict(0), predictor)
    fresh, _, _ = trained(OPTIMIZERS[name][0], updates=0)
    assert are_live(fresh.predict(2), fresh)


def are_live(ahead: list[Tensor], predictor: Predictor) -> bool:
    return all(a is p for a, p in zip(ahead, predictor.parameters, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_are_live_and_a_subset_keeps_its_order(name: str) -> None:
    first, frozen, last = parameters = weights((2,), (3,), (4,))
    optimizer = OPTIMIZERS[name][0]([last, first])
    predictor = Predictor(optimizer, parameters)
    train(optimizer, predictor)
    everything = predictor.predict(2)
    assert everything[1] is frozen
    assert_close(predictor.predict(2, [2, 1, 0]), everything[::-1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [partial(SGD, momentum=0.9), Adam])
def test_each_group_has_its_own_lr_as_it_is_now(kind: Callable[..., Optimizer]) -> None:
    slow, fast = parameters = weights((3,), (3,))
    optimizer = kind([{"params": [slow], "lr": 0.1}, {"params": [fast], "lr": 0.4}])
    predictor = Predictor(optimizer, parameters)
    train(optimizer, predictor)
    before = predictor.predict(1)
    optimizer.param_groups[1]["lr"] = 0.8
    after = predictor.predict(1)
    assert_close(after[0], before[0])
    assert_close(after[1] - fast.detach(), 2 * (before[1] - fast.detach()))


def test_a_loaded_state_is_the_one_that_predicts() -> None:
    """load_state_dict replaces the groups and the state; the predictor must not hold on to the old ones."""
    predictor, optimizer, now = trained(partial(SGD, lr=0.1, momentum=0.9))
    loaded = optimizer.state_dict()
    loaded["param_groups"][0]["lr"] = 0.7
    loaded["state"][0]["momentum_buffer"] = torch.ones(3, 2, dtype=torch.float64)
    optimizer.load_state_dict(loaded)
    assert_close(predictor.predict(1)[0], now[0] - 0.7)


def test_a_parameter_that_began_later_has_its_own_bias_correction() -> None:
    early, late = parameters = weights((2,), (2,))
    optimizer = Adam(parameters, lr=0.1, betas=(0.8, 0.9), eps=0.0)
    predictor = Predictor(optimizer, parameters)
    for late_grad in (None, torch.full((2,), 3.0, dtype=torch.float64)):
        early.grad, late.grad = torch.ones_like(early), late_grad
        optimizer.step()
    assert_close(predictor.predict(1), [early.detach() - 0.1, late.detach() - 0.1])


def test_a_parameter_without_gradients_stays_live() -> None:
    used, unused = parameters = weights((2,), (2,))
    optimizer = Adam(parameters, lr=0.1)
    predictor = Predictor(optimizer, parameters)
    used.grad = torch.ones_like(used)
    optimizer.step()
    assert predictor.predict(1)[1] is unused


def test_parameters_of_different_types_in_one_group() -> None:
    parameters = [torch.ones(3, dtype=dtype, requires_grad=True) for dtype in (torch.float64, torch.bfloat16)]
    optimizer = SGD(parameters, lr=0.5, momentum=0.9)
    predictor = Predictor(optimizer, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter, ahead in zip(parameters, predictor.predict(2), strict=True):
        assert_close(ahead, torch.full_like(parameter, -0.5))
        assert ahead.dtype == parameter.dtype


def test_the_rule_goes_by_the_exact_type() -> None:
    class Mine(Adam):
        pass

    [parameter] = parameters = weights((2,))
    complex_ = [torch.ones(2, dtype=torch.complex64, requires_grad=True)]
    groups: list[dict[str, Any]] = [{"params": [parameter]}, {"params": weights((2,)), "momentum": 0.0}]
    assert Predictor(Mine(parameters), parameters).rule == "last-update"
    assert Predictor(Adam(complex_), complex_).rule == "last-update"
    assert Predictor(SGD(groups, lr=0.1, momentum=0.9), parameters).rule == "last-update"


def test_only_the_last_update_rule_keeps_a_copy() -> None:
    assert len(trained(Sign)[0]._update) == 2
    assert not trained(Adam)[0]._update
