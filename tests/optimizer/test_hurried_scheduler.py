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
        "falls from 0.1 to 7.98e-05 in the first 20 updates, of 600",
    ),
    "imagenet": (lambda o: schedulers.StepLR(o, 30), "falls from 0.1 to 1e-05 in the first 120"),
    "cosine over 90 epochs": (lambda o: schedulers.CosineAnnealingLR(o, 90), "ends after 90 steps"),
    "one cycle over 20 epochs": (lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20), "ends after 20 steps"),
    "polynomial": (lambda o: schedulers.PolynomialLR(o, 10), "ends after 10 steps"),
    "exponential": (lambda o: schedulers.ExponentialLR(o, 0.95), "in the first 135 updates"),
    "lambda": (lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch), "in the first 66 updates"),
}
MEANT_FOR_UPDATES: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle over the epoch": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=600),
    "cosine over the epoch": lambda o: schedulers.CosineAnnealingLR(o, 600),
    "cosine over ten epochs": lambda o: schedulers.CosineAnnealingLR(o, 6000),
    "warm-up": lambda o: schedulers.LinearLR(o, 1e-4, total_iters=100),
    "warm-up from nothing": lambda o: schedulers.LambdaLR(o, lambda update: min(1.0, update / 50)),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 50, eta_min=1e-3),
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


@pytest.mark.parametrize("name", MEANT_FOR_UPDATES)
def test_meant_for_updates(name: str) -> None:
    assert hurried(*made(MEANT_FOR_UPDATES[name]), 600) is None


def test_a_short_run_shows_nothing() -> None:
    assert hurried(*made(MEANT_FOR_EPOCHS["mnist"][0]), 10) is None
