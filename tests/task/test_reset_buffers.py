"""What `reset(model)` is shown of the model, what it may change, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import TaskError
from fxpipe.task.hooks import Hooks
from fxpipe.task.model_file import Task
from fxpipe.task.reset_buffers import buffers_after


class Net(nn.Module):
    """A buffer with two names, others with one, and what is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("state", torch.ones(2, 3).t())
        self.register_buffer("other", torch.ones(2))
        self.register_buffer("count", torch.ones((), dtype=torch.int64), persistent=False)
        self.inner.register_buffer("same", self.state)
        self.plain = torch.ones(2)
        self.kept: list[Any] = [1, torch.ones(2)]
        self.steps = 0


def after(hook: Callable[[Any], Any], **rows: Tensor) -> dict[str, Tensor]:
    values = rows or {"state": torch.full((2, 3), 5.0).t(), "count": torch.tensor(5)}
    names = {name: (name, "inner.same") if name == "state" else (name,) for name in values}
    return Task(Hooks(reset=hook), seen=Net).reset({names[name]: value for name, value in values.items()})


def test_buffers_of_the_worker_are_live_and_all_else_has_no_values() -> None:
    def hook(model: Net) -> None:
        assert type(model) is Net
        assert model.other.is_meta
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.inner.same is model.state
        model.state.mul_(2)
        model.other.zero_()
        model.count = model.count - 5

    given = torch.full((2, 3), 5.0).t()
    found = after(hook, state=given, count=torch.tensor(5))
    assert {name: value.flatten().tolist() for name, value in found.items()} == {"state": [10.0] * 6, "count": [0]}
    assert found["state"].stride() == given.stride()
    assert given.eq(5).all(), "what was given has changed"


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (lambda model: model.inner.weight.zero_(), "changes inner.weight"),
        (lambda model: setattr(model.inner, "bias", None), "changes inner.bias"),
        (lambda model: setattr(model, "steps", 1), "changes steps"),
        (lambda model: setattr(model, "fresh", 1), "changes fresh"),
        (lambda model: setattr(model, "plain", torch.zeros(2)), "changes plain"),
        (lambda model: model.plain.zero_(), "changes plain"),
        (lambda model: model.kept[1].zero_(), "changes kept[1]"),
        (lambda model: model.kept.append(2), "changes kept[2]"),
        (lambda model: setattr(model, "inner", nn.Linear(2, 2)), "changes inner"),
        (lambda model: model.register_buffer("more", torch.ones(1)), "makes new buffers: more"),
        (lambda model: setattr(model, "count", torch.zeros(())), "makes torch.float32[] of buffer count"),
        (lambda model: setattr(model, "count", None), "makes nothing of buffer count"),
        (lambda model: setattr(model, "count", model.other.sum().long()), "a tensor without values"),
        (lambda model: setattr(model, "state", torch.zeros(3, 2)), "in one of the modules that share it"),
        (lambda model: model.other.item(), "reset() raised"),
        (lambda model: model.missing, "AttributeError"),
    ],
)
def test_what_is_refused(hook: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(TaskError) as caught:
        after(hook)
    assert said in caught.value.what
    assert caught.value.hint


def test_a_refused_change_leaves_the_model_as_it_was() -> None:
    model = Net()
    for _ in range(2):
        with pytest.raises(TaskError, match="changes kept"):
            buffers_after(model, lambda view: view.kept.append(2), {})
    assert len(model.kept) == 2


def test_there_must_be_a_model() -> None:
    with pytest.raises(TaskError, match="the build has only its parameters"):
        Task(Hooks(reset=lambda model: None))
