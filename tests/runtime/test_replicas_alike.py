"""Replicas that make the same update must have the same optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.runtime.wires.collective import LoneCollective
from fxpipe.runtime.worker.between_replicas import check_optimizers_alike

PARAMETERS = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(3))}
NAMES = {id(parameter): name for name, parameter in PARAMETERS.items()}


def number(made: Any, scheduler: Any = None) -> int:
    """What a replica tells the others."""
    told: list[int] = []

    class Heard(LoneCollective):
        def start_gather(self, key: Any, own: torch.Tensor, sizes: Sequence[int]) -> None:
            told.append(int(own))
            self._results[key] = own.repeat(len(sizes))

    check_optimizers_alike(0, made, scheduler, NAMES, Heard(2))
    return told[0]


def sgd(lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(PARAMETERS.values()), lr, **options)


def test_what_means_the_same_is_told_alike() -> None:
    assert number(sgd()) == number(sgd())
    assert number(None) == number(None)
    made, again = sgd(), sgd()
    pace = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.9**step) for each in (made, again)]
    assert number(made, pace[0]) == number(again, pace[1])


def test_what_would_train_otherwise_is_told_otherwise() -> None:
    apart = [{"params": [PARAMETERS["a"]], "lr": 0.1}, {"params": [PARAMETERS["b"]], "lr": 0.2}]
    swapped = [{"params": [PARAMETERS["b"]], "lr": 0.1}, {"params": [PARAMETERS["a"]], "lr": 0.2}]
    made = sgd()
    found = [
        number(sgd()),
        number(sgd(0.2)),
        number(sgd(momentum=0.9)),
        number(torch.optim.SGD(apart)),
        number(torch.optim.SGD(swapped)),
        number(torch.optim.Adam(PARAMETERS.values(), 0.1)),
        number(made, torch.optim.lr_scheduler.StepLR(made, 3)),
        number(made, torch.optim.lr_scheduler.StepLR(made, 4)),
    ]
    assert len(set(found)) == len(found)


def test_a_replica_with_another_one_is_named() -> None:
    """The others' numbers are zero here: no replica's is."""
    with pytest.raises(RunError, match="worker 3 have different optimizers: replica 1, replica 2 unlike"):
        check_optimizers_alike(3, sgd(), None, NAMES, LoneCollective(3))
