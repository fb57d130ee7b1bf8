"""Schedulers meant for epochs that make a step after every update, and such as are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from fxpipe.optimizer.hurried_scheduler import hurried

MEANT_FOR_EPOCHS: dict[str, tuple[Callable[[Optimizer], Any], str]] = {
    "mnist": (
        lambda o: schedulers.StepLR(o, 1, gamma=0.7),
        "falls from 0.1 to 0.00824 in the first 7 updates, of 600",
    ),
    "imagenet": (lambda o: schedulers.StepLR(o, 30), "falls from 0.1 to 0.001 in the first 60"),
    "cosine over 90 epochs": (lambda o: schedulers.CosineAnnealingLR(o, 90), "ends after 90 steps"),
    "one cycle over 20 epochs": (lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20), "ends after 20 steps"),
    "polynomial": (lambda o: schedulers.PolynomialLR(o, 10), "ends after 10 steps"),
    "exponential": (lambda o: schedulers.ExponentialLR(o, 0.95), "in the first 45 updates"),
    "lambda": (lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch), "in the first 22 updates"),
}
SMALL: dict[str, Callable[[Optimizer], Any]] = {
    "mnist": lambda o: schedulers.StepLR(o, 1, gamma=0.7),
    "every other": lambda o: schedulers.StepLR(o, 2, gamma=0.5),
    "milestones": lambda o: schedulers.MultiStepLR(o, [5, 8], gamma=0.1),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.8**epoch),
    "after a warm-up": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.StepLR(o, 1, gamma=0.7)], [3]
    ),
}
MEANT_FOR_UPDATES: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle over the epoch": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=600),
    "cosine over the epoch": lambda o: schedulers.CosineAnnealingLR(o, 600),
    "cosine over ten epochs": lambda o: schedulers.CosineAnnealingLR(o, 6000),
    "warm-up": lambda o: schedulers.LinearLR(o, 1e-4, total_iters=100),
    "warm-up from nothing": lambda o: schedulers.LambdaLR(o, lambda update: min(1.0, update / 50)),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 50, eta_min=1e-3),
    "slow exponential": lambda o: schedulers.ExponentialLR(o, 0.9999),
    "inverse square root without a warm-up": lambda o: schedulers.LambdaLR(o, lambda update: (update + 1) ** -0.5),
    "inverse square root": lambda o: schedulers.LambdaLR(o, lambda update: min((update + 1) ** -0.5, update / 4000)),
    "of a metric": lambda o: schedulers.ReduceLROnPlateau(o),
}


def made(make: Callable[[Optimizer], Any]) -> tuple[Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    return optimizer, make(optimizer)


@pytest.mark.parametrize("name", MEANT_FOR_EPOCHS)
def test_meant_for_epochs(name: str) -> None:
    make, why = MEANT_FOR_EPOCHS[name]
    optimizer, scheduler = made(make)
    found = hurried(optimizer, scheduler, 600)
    assert found is not None
    assert why in found
    assert optimizer.param_groups[0]["lr"] == made(make)[0].param_groups[0]["lr"]
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("name", SMALL)
def test_meant_for_epochs_of_few_updates(name: str) -> None:
    found = hurried(*made(SMALL[name]), 24)
    assert found is not None
    assert 'return scheduler, "epoch"' in found
    assert hurried(*made(SMALL[name]), 24, "this run", more=False) is None


COUNTED = [0]


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        COUNTED[0] += 1
        return 0.99**self.calls


def counting(optimizer: Optimizer) -> Any:
    calls = 0

    def rate(epoch: int) -> float:
        nonlocal calls
        calls += 1
        COUNTED[0] += 1
        rate.calls = calls  # type: ignore[attr-defined]
        return float(0.99**calls)

    return schedulers.LambdaLR(optimizer, rate)


@pytest.mark.parametrize("make", [counting, lambda o: schedulers.LambdaLR(o, Counting())], ids=["function", "object"])
def test_a_function_that_counts_does_not_count_what_is_tried(make: Callable[[Optimizer], Any]) -> None:
    optimizer, scheduler = made(make)
    calls = COUNTED[0]
    assert hurried(optimizer, scheduler, 600) is not None
    assert COUNTED[0] == calls
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.99**2)


def test_an_iterator_is_not_tried() -> None:
    rates = iter([0.5**n for n in range(100)])
    assert hurried(*made(lambda o: schedulers.LambdaLR(o, lambda epoch: next(rates))), 60) is None
    assert next(rates) == 0.5, "the scheduler itself has taken the first"


@pytest.mark.parametrize("name", MEANT_FOR_UPDATES)
def test_meant_for_updates(name: str) -> None:
    assert hurried(*made(MEANT_FOR_UPDATES[name]), 600) is None


def test_a_short_run_shows_nothing() -> None:
    assert hurried(*made(MEANT_FOR_EPOCHS["mnist"][0]), 10, "this run", more=False) is None
