"""What an optimizer keeps and takes for each byte of parameters."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from cached import lowered
from torch import Tensor

import fxpipe.costs.optimizer
from fxpipe.costs.optimizer import (
    STATE_SAMPLE,
    optimizer_costs,
)
from fxpipe.errors import TaskError
from fxpipe.plan.cost_records import OptimizerCosts, PolicyTimes, StepMemory

SMALL = [("weight", torch.zeros(256, 256)), ("bias", torch.zeros(256))]
LARGE = [("weight", torch.empty(1 << 14, 1 << 12, device="meta")), ("bias", torch.empty(1 << 14, device="meta"))]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def momentum(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.1)


def momentum_for_weights(named: Any) -> torch.optim.Optimizer:
    groups = [{"params": [p for n, p in named if n == "weight"], "momentum": 0.9},
              {"params": [p for n, p in named if n == "bias"]}]  # fmt: skip
    return torch.optim.SGD(groups, lr=0.1)


def state_bytes(parameters: list[tuple[str, Tensor]], optimizer: Any) -> float:
    return optimizer_costs(parameters, optimizer, timed=False, bandwidth=1.0).state_bytes


def seconds_per_byte(parameters: list[tuple[str, Tensor]], optimizer: Any) -> float:
    return optimizer_costs(parameters, optimizer, timed=True, bandwidth=1.0).seconds_per_byte


@pytest.mark.parametrize(("optimizer", "expected"), [(sgd, 0.0), (momentum, 1.0), (adam, 2.0)])
@pytest.mark.parametrize("parameters", [SMALL, LARGE])
def test_bytes_of_state(parameters: list[tuple[str, Tensor]], optimizer: Any, expected: float) -> None:
    assert state_bytes(parameters, optimizer) == pytest.approx(expected, abs=1e-3)


def together(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=0.1, foreach=True)


@pytest.mark.parametrize(
    ("optimizer", "largest", "every"), [(sgd, 0.0, 0.0), (momentum, 0.0, 0.0), (adam, 2.0, 0.0), (together, 0.0, 1.0)]
)
def test_what_a_step_holds(optimizer: Any, largest: float, every: float) -> None:
    """Adam takes parameters in turn on a CPU, and all together if it is asked to."""
    parameters = [("weight", torch.zeros(256, 256)), ("more", torch.zeros(128, 256)), ("bias", torch.zeros(256))]
    found = optimizer_costs(parameters, optimizer, timed=False, bandwidth=1e9).step
    assert (found.of_largest, found.of_all) == pytest.approx((largest, every), abs=0.02)
    assert found.keeps_update is (optimizer is sgd)


def test_a_step_that_cannot_be_looked_into_holds_nothing() -> None:
    class Once(torch.optim.SGD):
        made = 0

        def step(self, closure: Any = None) -> Any:
            self.made += 1
            if self.made > 2:
                raise RuntimeError("enough")
            return super().step(closure)

    found = optimizer_costs(SMALL, lambda named: Once([p for _, p in named], lr=0.1), timed=False, bandwidth=1e9)
    assert found.step == StepMemory(keeps_update=True)
    assert found.doubt is None


def test_every_parameter_counts_as_much_as_it_has() -> None:
    parameters = [("weight", torch.zeros(1000, 500)), ("bias", torch.zeros(1500, 1000))]
    assert state_bytes(parameters, momentum_for_weights) == pytest.approx(0.25, abs=1e-3)


def test_the_sample_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def watching(named: Any) -> torch.optim.Optimizer:
        made.append(sum(p.nbytes for _, p in named))
        assert [n for n, _ in named] == ["weight", "bias"]
        return momentum(named)

    seconds_per_byte(LARGE, watching)
    assert 0 < made[0] <= STATE_SAMPLE
    assert (1 << 20) <= made[1] <= 16 << 20


class Sleepy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(0.01)
        return super().step(closure)


def test_seconds_of_a_step() -> None:
    size = sum(t.nbytes for _, t in SMALL)
    found = seconds_per_byte(SMALL, lambda named: Sleepy([p for _, p in named], lr=0.1))
    assert 0.01 / size <= found < 1.0 / size
    assert 0 < seconds_per_byte(SMALL, sgd) < 0.01 / size


def test_many_tensors_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxpipe.costs.optimizer, "TIME_SAMPLE", 64 << 10)
    made: list[int] = []

    def watching(named: Any) -> torch.optim.Optimizer:
        made.append(sum(p.nbytes for _, p in named))
        return sgd(named)

    seconds_per_byte([(str(i), torch.zeros(64, 32)) for i in range(40)], watching)
    assert 32 << 10 <= made[1] <= 64 << 10


def test_nothing_to_train_costs_nothing() -> None:
    assert state_bytes([], adam) == seconds_per_byte([], adam) == 0.0


def test_an_optimizer_that_fails_is_the_users() -> None:
    def lbfgs(named: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([p for _, p in named])

    with pytest.raises(TaskError, match=r"LBFGS\.step\(\) needs a closure"):
        optimizer_costs(SMALL, lbfgs, timed=False, bandwidth=10.0)


@pytest.mark.parametrize("timed", [False, True])
def test_an_optimizer_that_finds_its_own_rate(timed: bool) -> None:
    def relative(named: Any) -> torch.optim.Optimizer:
        made = momentum(named)
        step, made.param_groups[0]["lr"] = made.step, None

        def with_rate(closure: Any = None) -> Any:
            made.param_groups[0]["lr"] = 0.1
            step()
            made.param_groups[0]["lr"] = None

        made.step = with_rate  # type: ignore[method-assign]
        return made

    found = optimizer_costs(SMALL, relative, timed=timed, bandwidth=10.0)
    assert (found.state_bytes, found.doubt) == (pytest.approx(1.0), None)


def test_what_an_optimizer_does_not_choose_costs_nothing() -> None:
    def chosen(text: str) -> Any:
        return lambda named: momentum([(n, p) for n, p in named if text in n])

    assert state_bytes(SMALL, chosen("bias")) == pytest.approx(1.0 / 257)
    assert optimizer_costs(SMALL, chosen("head"), timed=True, bandwidth=10.0) == OptimizerCosts(0.0, 0.0)


@pytest.mark.parametrize(
    ("optimizer", "has"), [(sgd, False), (momentum, True), (adam, True), (momentum_for_weights, False)]
)
def test_momentum_is_that_of_every_group(optimizer: Any, has: bool) -> None:
    named = [("weight", torch.zeros(3)), ("bias", torch.zeros(3))]
    assert optimizer_costs(named, optimizer, timed=False, bandwidth=10.0).momentum is has


def test_of_a_builds_parameters() -> None:
    build = lowered("gpt")
    named = [(p.name, build.tensors[p.name]) for p in build.plan.parameters if p.trained]
    assert state_bytes(named, adam) == pytest.approx(2.0, abs=0.05)


def test_costs_are_timed_or_computed() -> None:
    found = optimizer_costs(SMALL, momentum, timed=False, bandwidth=10.0)
    assert (found.state_bytes, found.seconds_per_byte) == (pytest.approx(1.0), pytest.approx(0.5))
    assert found.momentum
    assert found.policy == PolicyTimes(
        pytest.approx(0.3), pytest.approx(1.0), (("ef", pytest.approx(1.1)), ("brake", pytest.approx(0.8)))
    )
    found = optimizer_costs(SMALL, lambda named: Sleepy([p for _, p in named], lr=0.1), timed=True, bandwidth=10.0)
    size = sum(t.nbytes for _, t in SMALL)
    assert (found.state_bytes, found.doubt) == (0.0, None)
    assert 0.01 / size <= found.seconds_per_byte < 1.0 / size


@pytest.mark.parametrize("timed", [False, True])
def test_only_an_optimizer_with_momentum_has_error_feedback(timed: bool) -> None:
    for make, has in ((sgd, False), (momentum, True), (adam, True)):
        found = optimizer_costs(SMALL, make, timed=timed, bandwidth=1e9).policy
        assert 0 < found.prediction < 1e-6
        assert 0 < found.repetition < 1e-6
        assert (dict(found.repairs).get("ef", 0.0) > 0) == has


def test_what_policies_cost_for_each_byte_does_not_depend_on_the_size() -> None:
    """Timed on samples of one size: eight times the parameters take the same for each byte, give or take noise."""
    layers = [(f"{i}.weight", torch.zeros(512, 512)) for i in range(16)]
    one, eight = (optimizer_costs(named, adam, timed=True, bandwidth=1.0).policy for named in (layers, 8 * layers))
    assert 0.2 < dict(one.repairs)["ef"] / dict(eight.repairs)["ef"] < 5


@pytest.mark.parametrize("timed", [False, True])
def test_an_optimizer_that_wants_true_shapes_is_doubted(timed: bool) -> None:
    def picky(named: Any) -> torch.optim.Optimizer:
        assert all(p.shape in [(1 << 14, 1 << 12), (1 << 14,)] for _, p in named), "the wrong\nmodel"
        return momentum(named)

    with torch.device("meta"):
        large = [("weight", torch.empty(1 << 14, 1 << 12)), ("bias", torch.empty(1 << 14))]
    found = optimizer_costs(large, picky, timed=timed, bandwidth=10.0)
    assert (found.state_bytes, found.seconds_per_byte) == (1.0, 0.5)
    assert found.doubt is not None
    assert found.doubt.startswith("the optimizer fails on small copies of the model's parameters: AssertionError: the")
    assert found.doubt.endswith("1 bytes of state for each byte of weights and a computed update are assumed")
    assert "\n" not in found.doubt


def test_an_optimizer_that_fails_while_timed_is_doubted_too() -> None:
    class Tired(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            if self.steps > 3:
                raise RuntimeError("enough")
            return super().step(closure)

    found = optimizer_costs(SMALL, lambda named: Tired([p for _, p in named], lr=0.1), timed=True, bandwidth=10.0)
    assert (found.state_bytes, found.seconds_per_byte) == (0.0, pytest.approx(0.3))
    assert found.doubt is not None
    assert "RuntimeError: enough" in found.doubt
