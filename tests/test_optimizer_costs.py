"""What an optimizer keeps and takes for each byte of parameters."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from cached import lowered
from torch import Tensor

from fxpipe import optimizer_costs
from fxpipe.errors import TaskError
from fxpipe.optimizer_costs import STATE_SAMPLE, optimizer_bytes, trained_parameters, update_seconds_per_byte

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


@pytest.mark.parametrize(("optimizer", "expected"), [(sgd, 0.0), (momentum, 1.0), (adam, 2.0)])
@pytest.mark.parametrize("parameters", [SMALL, LARGE])
def test_bytes_of_state(parameters: list[tuple[str, Tensor]], optimizer: Any, expected: float) -> None:
    assert optimizer_bytes(parameters, optimizer, "cpu") == pytest.approx(expected, abs=1e-3)


def test_every_parameter_counts_as_much_as_it_has() -> None:
    parameters = [("weight", torch.zeros(1000, 500)), ("bias", torch.zeros(1500, 1000))]
    assert optimizer_bytes(parameters, momentum_for_weights) == pytest.approx(0.25, abs=1e-3)


def test_the_sample_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def watching(named: Any) -> torch.optim.Optimizer:
        made.append(sum(p.nbytes for _, p in named))
        assert [n for n, _ in named] == ["weight", "bias"]
        return momentum(named)

    optimizer_bytes(LARGE, watching, "cpu")
    update_seconds_per_byte(LARGE, watching, "cpu")
    assert 0 < made[0] <= STATE_SAMPLE
    assert (1 << 20) <= made[1] <= 16 << 20


class Sleepy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(0.01)
        return super().step(closure)


def test_seconds_of_a_step() -> None:
    size = sum(t.nbytes for _, t in SMALL)
    found = update_seconds_per_byte(SMALL, lambda named: Sleepy([p for _, p in named], lr=0.1))
    assert 0.01 / size <= found < 1.0 / size
    assert 0 < update_seconds_per_byte(SMALL, sgd) < 0.01 / size


def test_many_tensors_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_costs, "TIME_SAMPLE", 64 << 10)
    made: list[int] = []

    def watching(named: Any) -> torch.optim.Optimizer:
        made.append(sum(p.nbytes for _, p in named))
        return sgd(named)

    update_seconds_per_byte([(str(i), torch.zeros(64, 32)) for i in range(40)], watching)
    assert 32 << 10 <= made[0] <= 64 << 10


def test_nothing_to_train_costs_nothing() -> None:
    assert optimizer_bytes([], adam) == update_seconds_per_byte([], adam) == 0.0


def test_an_optimizer_that_fails_is_the_users() -> None:
    def lbfgs(named: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([p for _, p in named])

    with pytest.raises(TaskError, match="the optimizer fails on small copies of the model's parameters: TypeError"):
        optimizer_bytes(SMALL, lbfgs)


def test_a_builds_parameters() -> None:
    build = lowered("gpt")
    found = dict(trained_parameters(build))
    assert found.keys() == {p.name for p in build.plan.parameters if p.trained}
    assert found["blocks.0.qkv.weight"] is build.tensors["blocks.0.qkv.weight"]
    assert optimizer_bytes(list(found.items()), adam) == pytest.approx(2.0, abs=0.05)


def test_the_lower_quartile_forgets_disturbed_times() -> None:
    assert optimizer_costs.quartile([9.0, 1.0, 2.0, 3.0, 8.0, 7.0, 6.0, 5.0]) == 3.0
    assert optimizer_costs.quartile([4.0]) == 4.0
