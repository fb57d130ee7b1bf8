"""Batches as libraries give them: mappings, named tuples and dataclasses reach the model as what they are."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxpipe as api
from fxpipe.errors import BatchError
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.task.batch import Batch
from fxpipe.task.containers import flatten
from fxpipe.torch_private import pytree


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding: items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    note: str = "some"
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.size = len(self.x)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def tensors(samples: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 6), "y": torch.randint(0, 3, (samples,))}


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "mapping": (lambda: Encoding(tensors()), lambda batch: (batch["x"], batch.y)),
    "dataclass": (lambda: Sample(**tensors()), lambda batch: (batch.x[: batch.size], batch.y)),
    "named tuple": (lambda: Pair(**tensors()), lambda batch: (batch.x, batch.y)),
    "nested": (
        lambda: {"in": [Encoding(tensors())], "more": Sample(**tensors())},
        lambda b: (b["in"][0].x, b["more"].y),
    ),
}


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_in_eager(kind: str) -> None:
    make, parts = KINDS[kind]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = parts(batch)
        return cross_entropy(model(x), y)

    torch.manual_seed(0)
    model = Layers()
    build = api.compile(model, loss, make(), workers=2, schedule="1f1b", microbatches=4, cost="analytic")
    assert compare_with_eager(build, model, loss, make()).largest < 1e-5
    pipeline = build.local()
    assert all(torch.isfinite(pipeline.step(make())) for _ in range(3))


def test_a_container_that_cannot_be_made_again_is_named() -> None:
    @dataclass
    class Doubled:
        x: Tensor

        def __post_init__(self) -> None:
            self.x = 2 * self.x

    with pytest.raises(BatchError, match="Doubled, which cannot be rebuilt from its content"):
        flatten(Doubled(torch.ones(2)))


def test_a_field_that_construction_does_not_set_is_refused() -> None:
    @dataclass
    class Filled:
        x: Tensor
        mask: Tensor | None = field(init=False, default=None)

    batch = Filled(torch.ones(2))
    batch.mask = torch.zeros(2)
    with pytest.raises(BatchError, match="Filled, which cannot be rebuilt"):
        flatten(batch)


class Tag:
    def __init__(self, name: str) -> None:
        self.name = name


class Box:
    """A node of pytrees, registered as its author likes."""

    def __init__(self, x: Tensor, y: Tensor, tag: Any) -> None:
        self.x, self.y, self.tag = x, y, tag


def _registered(tag: Any, **more: Any) -> Any:
    kind: Any = type("Box", (Box,), {})
    pytree.register_pytree_node(kind, lambda b: ([b.x, b.y], b.tag), lambda c, t: kind(*c, t), **more)
    return kind(torch.randn(4, 3), torch.randint(0, 2, (4,)), tag)


@pytest.mark.parametrize(
    ("tag", "more"),
    [
        (None, {}),
        (torch.Size([4]), {"serialized_type_name": "a box"}),
        (Tag("one"), {}),
        ({("a", 1): Tag}, {}),
        (torch.device("cpu"), {}),
    ],
)
def test_a_registered_node_is_a_batch(tag: Any, more: Any) -> None:
    batch = _registered(tag, **more)
    assert Batch.of(batch).names == ("batch.x", "batch.y")
    again = Batch.of(batch).each(torch.clone)
    assert again.shape == Batch.of(batch).shape
    assert " at 0x" not in pytree.treespec_dumps(again.tree)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    build = api.compile(model, lambda m, b: cross_entropy(m(b.x), b.y), batch, workers=2, microbatches=2)
    with build.local() as pipeline:
        assert float(pipeline.step(batch)) == pytest.approx(float(cross_entropy(model(batch.x), batch.y)))


def test_other_contexts_are_another_structure() -> None:
    one, two = _registered(Tag("one")), _registered(Tag("one"))
    two.__class__ = type(one)
    assert Batch.of(one).shape == Batch.of(two).shape
    two.tag.name = "two"
    assert Batch.of(one).shape != Batch.of(two).shape
