"""Predicted weights against formulas written by hand, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import OneCycleLR
from torch.testing import assert_close

from fxpipe.policy.optimizers import rules
from fxpipe.policy.optimizers.predict import Predictor

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


class Lion(Optimizer):
    """As it is found in many repositories (Chen et al. 2023): a state of its own, and a decay of its own."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                direction = state["exp_avg"].lerp(parameter.grad, 1 - first).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                state["exp_avg"].lerp_(parameter.grad, 1 - second)


@pytest.fixture(params=["each", "fused"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas as they run on a CPU, and, on the CPU too, as they run on a GPU."""
    if request.param == "fused":
        monkeypatch.setattr(rules, "_on_cpu", lambda weights: False)


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
        predictor.after_step()


def trained(make: Make, updates: int = 3) -> tuple[Predictor, Optimizer, list[Tensor]]:
    parameters = weights((3, 2), (4,))
    optimizer = make(parameters)
    predictor = Predictor(optimizer, parameters)
    train(optimizer, predictor, updates)
    return predictor, optimizer, [p.detach().clone() for p in parameters]


def check(make: Make, rule: str, moved: Callable[[Tensor, Any], Tensor]) -> None:
    """Four steps ahead, each parameter is less what `moved` makes of it and of its optimizer's state."""
    predictor, optimizer, now = trained(make)
    assert predictor.rules == (rule,)
    for parameter, w, ahead in zip(predictor.parameters, now, predictor.predict(4), strict=True):
        assert_close(ahead, w - moved(parameter, optimizer.state[parameter]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("kind", "decoupled"), [(Adam, 0.0), (AdamW, 0.2)])
def test_adam(kind: Callable[..., Optimizer], decoupled: float, amsgrad: bool) -> None:
    def moved(w: Tensor, state: Any) -> Tensor:
        m = state["exp_avg"] / (1 - 0.8**3)
        v = state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"] / (1 - 0.9**3)
        return 4 * 0.1 * (m / (v.sqrt() + 1e-3) + decoupled * w)

    check(partial(kind, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, amsgrad=amsgrad), "adam", moved)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", [{}, {"decoupled_weight_decay": True}, {"maximize": True, "momentum_decay": 0.3}])
def test_nadam_repeats_its_own_step_with_its_momentum_for_the_gradient(options: dict[str, Any]) -> None:
    """The second moment is set before each step, so that v̂ stays as it is."""
    make = partial(NAdam, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, eps=1e-3, **options)
    predictor, optimizer, now = trained(make)
    assert predictor.rules == ("nadam",)
    found = predictor.predict(4)
    sign = -1 if optimizer.param_groups[0]["maximize"] else 1
    decoupled = 0.2 if optimizer.param_groups[0]["decoupled_weight_decay"] else 0.0
    for parameter, w, ahead in zip(predictor.parameters, now, found, strict=True):
        own = w.clone().requires_grad_()
        alone = make([own])
        alone.param_groups[0]["weight_decay"] = 0.0
        alone.state[own] = {k: torch.as_tensor(v).clone() for k, v in optimizer.state[parameter].items()}
        state, second = alone.state[own], optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.9**3)
        for t in range(4, 8):
            own.grad = sign * state["exp_avg"].clone()
            state["exp_avg_sq"].copy_((second * (1 - 0.9**t) - 0.1 * own.grad**2) / 0.9)
            alone.step()
        assert_close(ahead, own - 4 * 0.1 * decoupled * w)


def test_any_other_optimizer_repeats_its_last_update() -> None:
    for make in (Sign, Lion, RAdam):
        predictor, optimizer, before = trained(make)
        train(optimizer, predictor, updates=1)
        for live, w, ahead in zip(predictor.parameters, before, predictor.predict(4), strict=True):
            assert_close(ahead, live + 4 * (live - w))
    [matrix] = parameters = weights((3, 2))
    optimizer = Muon(parameters, lr=0.1)
    predictor = Predictor(optimizer, parameters)
    train(optimizer, predictor, updates=2)
    assert predictor.rules == ("last-update",)
    assert_close(predictor.predict(1)[0], matrix + predictor._update[id(matrix)])


OPTIMIZERS: dict[str, tuple[Make, str]] = {
    "momentum": (partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.3), "momentum"),
    "momentum-maximize": (partial(SGD, lr=0.1, momentum=0.9, maximize=True), "momentum"),
    "adam": (partial(Adam, lr=0.1, weight_decay=0.1), "adam"),
    "adam-maximize": (partial(Adam, lr=0.1, maximize=True), "adam"),
    "amsgrad": (partial(Adam, lr=0.1, amsgrad=True, betas=(0.5, 0.5)), "adam"),
    "adamw-no-decay": (partial(AdamW, lr=0.1, weight_decay=0.0), "adam"),
    "tensor-lr": (partial(Adam, lr=torch.tensor(0.1, dtype=torch.float64), foreach=False), "adam"),
    "sgd": (partial(SGD, lr=0.1), "last-update"),
    "sgd-maximize": (partial(SGD, lr=0.1, maximize=True), "last-update"),
    "rmsprop": (partial(RMSprop, lr=0.1), "last-update"),
    "rmsprop-centered": (partial(RMSprop, lr=0.1, centered=True, maximize=True), "last-update"),
    "rmsprop-momentum": (partial(RMSprop, lr=0.1, momentum=0.8, weight_decay=0.1, centered=True), "momentum"),
    "adagrad": (partial(Adagrad, lr=0.1), "last-update"),
    "adagrad-maximize": (partial(Adagrad, lr=0.1, maximize=True), "last-update"),
    "radam": (partial(RAdam, lr=0.1), "last-update"),
    "own": (Sign, "last-update"),
    "lion": (Lion, "last-update"),
}


EVERY = {**OPTIMIZERS, "nadam": (partial(NAdam, lr=0.1), "nadam")}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_step_ahead_repeats_the_last_update(name: str) -> None:
    """True of every rule while lr stands still (nesterov and decoupled decay aside, see the docstring)."""
    make, rule = OPTIMIZERS[name]
    predictor, optimizer, before = trained(make)
    assert predictor.rules == (rule,)
    train(optimizer, predictor, updates=1)
    for live, w, ahead in zip(predictor.parameters, before, predictor.predict(2), strict=True):
        assert_close(ahead, live + 2 * (live - w))
        assert not torch.equal(live, w)


@pytest.mark.parametrize("name", EVERY)
def test_nothing_live_is_touched(name: str) -> None:
    predictor, optimizer, now = trained(EVERY[name][0])
    state = [{k: torch.as_tensor(v).clone() for k, v in s.items()} for s in optimizer.state.values()]
    once = predictor.predict(3)
    for ahead, live, w in zip(once, predictor.parameters, now, strict=True):
        assert ahead.data_ptr() != live.data_ptr()
        assert not ahead.requires_grad
        assert torch.equal(live, w)
    assert_close([dict(s) for s in optimizer.state.values()], state)
    assert_close(predictor.predict(3), once, rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_live_where_there_is_nothing_to_predict(name: str) -> None:
    predictor, _, _ = trained(EVERY[name][0])
    assert are_live(predictor.predict(0), predictor)
    fresh, _, _ = trained(EVERY[name][0], updates=0)
    assert are_live(fresh.predict(2), fresh)


def are_live(ahead: list[Tensor], predictor: Predictor) -> bool:
    return all(a is p for a, p in zip(ahead, predictor.parameters, strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_frozen_parameters_are_live_and_a_subset_keeps_its_order(name: str) -> None:
    first, frozen, last = parameters = weights((2,), (3,), (4,))
    optimizer = EVERY[name][0]([last, first])
    predictor = Predictor(optimizer, parameters)
    train(optimizer, predictor)
    everything = predictor.predict(2)
    assert everything[1] is frozen
    assert_close(predictor.predict(2, [2, 1, 0]), everything[::-1], rtol=0, atol=0)


def test_a_parameter_that_began_later_has_its_own_bias_correction() -> None:
    early, late = parameters = weights((2,), (2,))
    optimizer = Adam(parameters, lr=0.1, betas=(0.8, 0.9), eps=0.0)
    predictor = Predictor(optimizer, parameters)
    for late_grad in (None, torch.full((2,), 3.0, dtype=torch.float64)):
        early.grad, late.grad = torch.ones_like(early), late_grad
        optimizer.step()
    assert_close(predictor.predict(1), [early.detach() - 0.1, late.detach() - 0.1])


def test_the_rule_goes_by_the_exact_type() -> None:
    class Mine(Adam):
        pass

    [parameter] = parameters = weights((2,))
    complex_ = [torch.ones(2, dtype=torch.complex64, requires_grad=True)]
    groups: list[dict[str, Any]] = [{"params": [parameter]}, {"params": weights((2,)), "momentum": 0.0}]
    assert Predictor(Mine(parameters), parameters).rules == ("last-update",)
    assert Predictor(Adam(complex_), complex_).rules == ("last-update",)
    assert Predictor(SGD(groups, lr=0.1, momentum=0.9), parameters).rules == ("momentum", "last-update")


@pytest.mark.parametrize("name", EVERY)
def test_no_gradient_is_read(name: str) -> None:
    predictor, _, _ = trained(EVERY[name][0])
    before = predictor.predict(2)
    for parameter in predictor.parameters:
        parameter.grad = None
    assert_close(predictor.predict(2), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_the_weight_form_repeats_the_last_update_of_every_optimizer(name: str) -> None:
    parameters = weights((3, 2), (4,))
    optimizer = EVERY[name][0](parameters)
    predictor = Predictor(optimizer, parameters, weight_form=True)
    train(optimizer, predictor)
    before = [p.detach().clone() for p in parameters]
    train(optimizer, predictor, updates=1)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 7  # says nothing here
    for live, w, ahead in zip(parameters, before, predictor.predict(3), strict=True):
        assert_close(ahead, live + 3 * (live - w))


def test_a_rate_that_was_zero_cannot_be_scaled() -> None:
    [parameter] = parameters = weights((3,))
    optimizer = Lion(parameters, lr=0.1)
    predictor = Predictor(optimizer, parameters)
    train(optimizer, predictor, updates=1)
    update = predictor._update[id(parameter)].clone()
    optimizer.param_groups[0]["lr"] = 0.3
    assert_close(predictor.predict(2)[0], parameter.detach() + 6 * update)
    optimizer.param_groups[0]["lr"] = 0.0
    assert_close(predictor.predict(2)[0], parameter.detach() + 2 * update)
    train(optimizer, predictor, updates=1)
    optimizer.param_groups[0]["lr"] = 0.3
    assert_close(predictor.predict(2)[0], parameter.detach())


def test_an_optimizer_without_a_rate() -> None:
    class Fixed(Sign):
        def __init__(self, params: list[Tensor]) -> None:
            super().__init__(params)
            del self.param_groups[0]["lr"]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter -= 0.5

    predictor, _, now = trained(Fixed)
    assert_close(predictor.predict(3), [w - 1.5 for w in now])


@pytest.mark.parametrize("make", [partial(SGD, momentum=0.9), Adam])
def test_a_scheduler_may_cycle_momentum(make: Callable[..., Optimizer]) -> None:
    [parameter] = parameters = weights((3,))
    optimizer = make(parameters, lr=0.1)
    predictor = Predictor(optimizer, parameters)
    scheduler = OneCycleLR(optimizer, 0.4, total_steps=6)
    for _ in range(4):
        train(optimizer, predictor, updates=1)
        scheduler.step()
        assert predictor.predict(2)[0].isfinite().all()
    if isinstance(optimizer, SGD):
        reach = 2 * optimizer.param_groups[0]["lr"]
        expected = parameter.detach() - reach * optimizer.state[parameter]["momentum_buffer"]
        assert_close(predictor.predict(2)[0], expected)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("make", [partial(SGD, lr=0.5), partial(Adam, lr=0.1), RMSprop, Adagrad, Lion])
def test_rules_keep_each_parameter_s_type(make: Make) -> None:
    parameters = [torch.ones(3, dtype=dtype, requires_grad=True) for dtype in (torch.float64, torch.bfloat16)]
    optimizer = make(parameters)
    predictor = Predictor(optimizer, parameters)
    train(optimizer, predictor, updates=2)
    for parameter, ahead in zip(parameters, predictor.predict(2), strict=True):
        assert ahead.dtype == parameter.dtype
        assert (ahead != parameter).all()


@pytest.mark.parametrize("name", EVERY)
def test_memory_given_back_is_used_again_and_says_nothing_of_its_past(name: str) -> None:
    predictor, _, _ = trained(EVERY[name][0])
    once = predictor.predict(2)
    values = [tensor.clone() for tensor in once]
    addresses = {tensor.data_ptr() for tensor in once}
    for tensor in once:
        tensor.fill_(torch.nan)
    predictor.give_back(once, [0, 1])
    again = predictor.predict(2)
    assert {tensor.data_ptr() for tensor in again} == addresses
    assert_close(again, values, rtol=0, atol=0)
