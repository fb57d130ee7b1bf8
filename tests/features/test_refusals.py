"""Features that no pipeline can hold, or not yet: refused with a cause and a cure, never captured wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from features import WIDTH, Around, squared, vectors
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import BatchError, CaptureError, CutError


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Looked(nn.Module):
    """An embedding with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH + 1, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x > 0).long().sum(1))


class Cumulative(nn.Module):
    """An average over all steps so far reads the number of steps out of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class PostAccumulate(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.register_post_accumulate_grad_hook(lambda p: None)


class ReplacesWeight(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.weight = nn.Parameter(self.weight * 0.9)
        return super().forward(x)


class SharedView(nn.Module):
    """Two buffers that are views of one memory, of which one changes."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(2, WIDTH)
        self.register_buffer("first", both[0])
        self.register_buffer("both", both)

    def forward(self, x: Tensor) -> Tensor:
        self.first += x.detach().mean(0)
        return x + self.both.sum(0)


class Fields:
    """Neither a dataclass nor a mapping."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def of_fields(model: nn.Module, batch: Fields) -> Tensor:
    return squared(model, (batch.x, batch.y))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Lazy, "middle.layer.weight is lazy: it has no shape yet"),
        (lambda: Looked(sparse=True), "the gradient of middle.table.weight is sparse"),
        (lambda: Looked(max_norm=0.5), "changes parameter middle.table.weight in place"),
        (Cumulative, "a batch norm with momentum=None averages over all steps"),
        (PostAccumulate, "parameter middle.weight has a post-accumulate-grad hook"),
        (ReplacesWeight, "the step replaces parameter middle.weight"),
        (SharedView, "share memory"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_modules_are_refused_with_cause_and_cure(make: Callable[[], nn.Module], message: str) -> None:
    refused(Around(make()), squared, vectors(4), message)


def test_a_batch_of_no_known_kind_is_refused() -> None:
    refused(Around(nn.Tanh()), of_fields, Fields(*vectors(4)), "Fields")


def refused(model: nn.Module, loss: Callable[..., Tensor], batch: Any, message: str) -> None:
    with pytest.raises((CaptureError, BatchError), match=message) as caught:
        fxpipe.capture(model, loss, batch)
    assert caught.value.hint


class Graph(nn.Module):
    """A sparse matrix multiplies the values of every layer."""

    def __init__(self, constant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.register_buffer("places", torch.tensor([[0, 1, 2], [2, 0, 1]]))
        self.register_buffer("weights", torch.ones(3))
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights if self.constant else x.detach()[:3, 0]
        edges = torch.sparse_coo_tensor(self.places, weights, (4, 4))
        for layer in self.layers:
            x = torch.sparse.mm(edges, torch.tanh(layer(x)))
        return x


def test_a_sparse_value_may_not_cross_workers() -> None:
    program = fxpipe.capture(Graph(constant=False), squared, vectors(4))
    with pytest.raises(CutError, match="would send worker 1 the sparse tensor") as caught:
        fxpipe.lower(program, cost="analytic", forward_at=["layers.2"], backward_at=["layers.1"])
    assert "sparse_coo_tensor(self.places" in str(caught.value.where)
    assert "to_dense" in str(caught.value.hint)


def test_capture_says_what_hooks_see() -> None:
    model = Around(nn.Linear(WIDTH, WIDTH))
    model.middle.register_full_backward_hook(lambda module, into, out: None)
    model.after[0].weight.register_hook(lambda gradient: gradient)
    (warning,) = fxpipe.capture(model, squared, vectors(4)).warnings
    assert "hooks see one microbatch's gradient at a time" in warning
    assert "after.0.weight, middle" in warning
    one, two = (fxpipe.compile(model, squared, vectors(4), cost="analytic", microbatches=n).warnings for n in (1, 2))
    assert not any("gradient hooks" in said for said in one)
    assert any("gradient hooks" in said for said in two)
