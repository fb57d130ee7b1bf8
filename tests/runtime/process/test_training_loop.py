"""What a process does with its row: how far its host is ahead of the device, and when it reads a loss."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Made
from typing import Any

import pytest
import torch
from pretended_streams import LateToCpu

from fxpipe.device_copies import ToCpu
from fxpipe.runtime.process import training_loop
from fxpipe.runtime.process.losses import StepLoss
from fxpipe.runtime.process.steps_recorded import StepsRecorded
from fxpipe.runtime.process.training_loop import EndedStep, posted
from fxpipe.schedule.action import Action


def test_the_host_is_at_most_two_actions_ahead_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    log, launched = list[str](), list[str]()

    def mark(device: torch.device) -> Callable[[], None]:
        what = launched[-1]
        return lambda: log.append(f"{what} is over")

    monkeypatch.setattr(training_loop, "mark", mark)
    coming = iter([(0, Action("F", minibatch)) for minibatch in range(5)])
    for event in posted(lambda: next(coming, None), lambda event: None, 3, torch.device("cpu")):
        if event is None:
            break
        launched.append(str(event[1].minibatch))
        log.append(launched[-1])
    assert log == ["0", "1", "2", "0 is over", "3", "1 is over", "4", "2 is over"]


def test_a_loss_is_read_a_minibatch_later_unless_something_follows_from_its_step() -> None:
    """A checkpoint after step 3, an evaluation after 5, a callback after 6."""
    recorded, checked = list[tuple[int, float]](), list[int]()
    record: Any = Made(step=lambda step: recorded.append((step.minibatch, step.loss)))
    check: Any = Made(look=lambda minibatch, loss: checked.append(minibatch))
    steps = StepsRecorded(record, [(3).__eq__, (5).__eq__, (6).__eq__])
    steps.check = check
    counts = []
    for minibatch in range(7):
        steps.report(EndedStep(minibatch, _loss(LateToCpu(torch.tensor([0.5 + minibatch]))), None, None, None))
        after: Any = Made(store=Made(version=minibatch + 1))
        steps.between([after])
        counts.append(len(recorded))
    assert counts == [0, 1, 3, 3, 5, 6, 6]
    steps.report(EndedStep(7, _loss(ToCpu(torch.tensor([7.5]))), None, None, None))
    assert recorded == [(minibatch, 0.5 + minibatch) for minibatch in range(8)]
    assert checked == [*range(8)]


def _loss(numbers: ToCpu) -> StepLoss:
    loss = StepLoss(lambda: None, ())
    loss.comes(numbers)
    return loss
