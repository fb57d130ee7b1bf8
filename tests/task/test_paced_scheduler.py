"""What `lr_scheduler()` may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, SequentialLR, StepLR

from fxpipe.errors import TaskError
from fxpipe.task.paced_scheduler import PacedScheduler, paced
from fxpipe.task.several_optimizers import SeveralOptimizers


class Told:
    """As timm's."""

    def step(self, epoch: int, metric: float | None = None) -> None:
        del epoch, metric


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda optimizer: 0.1, "float, which has no step"),
        (lambda optimizer: optimizer, "an optimizer, which would make every update twice"),
        (lambda optimizer: (optimizer, "epoch"), "an optimizer, which would make every update twice"),
        (lambda optimizer: StepLR(sgd(), 1), "of another optimizer"),
        (lambda optimizer: (ReduceLROnPlateau(sgd()), "loss"), "of another optimizer"),
        (lambda optimizer: ReduceLROnPlateau(optimizer), "without a metric"),
        (lambda optimizer: (StepLR(optimizer, 1), "minute"), "for every 'minute'"),
        (lambda optimizer: (Told(), "epoch"), r"Told.step\(epoch.* needs an argument"),
    ],
)
def test_what_would_train_otherwise_is_refused(make: Callable[[Any], Any], message: str) -> None:
    optimizer = sgd()
    with pytest.raises(TaskError, match=message) as error:
        paced(make(optimizer), optimizer)
    assert error.value.hint


def test_a_scheduler_of_a_part_is_taken() -> None:
    parts = SeveralOptimizers([sgd(), sgd()])
    of_part, of_all = StepLR(parts.optimizers[1], 1), StepLR(parts, 1)
    assert paced(of_part, parts) == PacedScheduler(of_part)
    assert paced((of_all, "epoch"), parts) == PacedScheduler(of_all, per_epoch=True)
    one = sgd()
    row = SequentialLR(one, [ConstantLR(one), StepLR(one, 1)], [2])
    assert paced(row, one) == PacedScheduler(row)
