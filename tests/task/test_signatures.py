"""Hooks that cannot be called as fxpipe calls them are refused before any work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import TaskError
from fxpipe.optimizer.per_worker import check_per_worker
from fxpipe.task.callbacks import ARGUMENTS, CALLBACKS, takes
from fxpipe.task.hooks import Hooks
from fxpipe.task.model_file import Task
from fxpipe.task.one_optimizer import OptimizerRefused


@pytest.mark.parametrize(("name", "arguments"), [*ARGUMENTS.items(), *CALLBACKS.items()])
def test_a_hook_with_other_parameters_is_refused(name: str, arguments: str) -> None:
    hooks: dict[str, Any] = {"model": nn.Module, name: lambda a, b, c, d, e: None}
    with pytest.raises(TaskError, match=rf"{name}\(a, b, c, d, e\) has other parameters") as caught:
        Task(Hooks(**hooks))
    takes_model = name == "optimizer"  # its second parameter has no default
    assert caught.value.hint == f"def {name}{'(named_parameters, model)' if takes_model else arguments}"


@pytest.mark.parametrize(
    ("function", "count"),
    [(torch.optim.SGD, 1), (functools.partial(max, 1), 3), (lambda *given: given, 2), (lambda a, b=1: a, 1), (dict, 1)],
)
def test_what_can_be_called_is_taken(function: Callable[..., Any], count: int) -> None:
    assert takes(function, count)


class Needy:
    def step(self, epoch: int) -> None:
        del epoch


def test_compile_refuses_a_scheduler_that_needs_the_epoch() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    build = fxpipe.compile(model, lambda m, batch: m(batch).sum(), torch.ones(2, 2), workers=2)
    with pytest.raises(OptimizerRefused, match="needs an argument"):
        check_per_worker(build.plan, None, lambda optimizer: (Needy(), "epoch"))
