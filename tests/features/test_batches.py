"""Batches: keywords, nesting, plain constants, inputs that enter at different stages."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from features import WIDTH, Feature, check
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe


class Inputs(NamedTuple):
    x: Tensor
    late: Tensor | None


Target = namedtuple("Target", "value weight")


class Late(nn.Module):
    """Layers, of which the later ones read inputs of their own; all arguments by keyword only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.table = nn.Embedding(5, WIDTH)

    def forward(
        self,
        *,
        x: Tensor,
        ids: Tensor | None = None,
        keep: Tensor | None = None,
        scale: float = 1.0,
        late: Tensor | None = None,
        mode: str = "plain",
        double: bool = False,
        power: int = 1,
        **more: Tensor,
    ) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * scale
            if i == 1 and ids is not None:
                x = x + self.table(ids)
            if i == 3 and keep is not None:
                x = torch.where(keep[:, None], x, -x)
            if i == 4 and late is not None:
                x = x + (late if mode == "plain" else late.tanh())
        x = x * 2 if double else x
        for value in more.values():
            x = x + value
        return x**power


def keywords(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    batch = dict(batch)
    target = batch.pop("target")
    return F.mse_loss(model(**batch), target)


def dictionary(size: int) -> dict[str, Any]:
    return {
        "x": torch.randn(size, WIDTH),
        "late": torch.randn(size, WIDTH),
        "ids": torch.randint(0, 5, (size,)),
        "keep": torch.rand(size) > 0.5,
        "target": torch.randn(size, WIDTH),
        "extra": torch.randn(size, 1),
    }


def constants(size: int) -> dict[str, Any]:
    """None, int, float, bool and str beside tensors."""
    plain = {"ids": None, "scale": 0.5, "mode": "tanh", "double": True, "power": 2, "keep": None}
    return {**dictionary(size), **plain}


def nested(size: int) -> Any:
    """Dicts, lists, tuples, named tuples and an ordered dict, empty ones and None among them."""
    inputs = OrderedDict(first=Inputs(torch.randn(size, WIDTH), None), second=Inputs(torch.randn(size, WIDTH), None))
    targets = [Target(torch.randn(size, WIDTH), torch.rand(size)), (torch.randn(size, WIDTH), {})]
    return {"inputs": inputs, "targets": targets, "nothing": [], "more": {"deep": ({"keep": torch.rand(size) > 0.3},)}}


def from_nested(model: nn.Module, batch: Any) -> Tensor:
    first, second = batch["inputs"].values()
    keep = batch["more"]["deep"][0]["keep"]
    out = model(x=first.x, late=second.x, keep=keep)
    (value, weight), (other, empty) = batch["targets"]
    assert first.late is None
    assert not empty
    return (F.mse_loss(out, value, reduction="none").mean(1) * weight).mean() + F.l1_loss(out, other)


def numbers(size: int) -> Any:
    """Floats of three widths, integers of three kinds and bytes."""
    return {
        "x": torch.randn(size, WIDTH),
        "double": torch.randn(size, WIDTH, dtype=torch.float64),
        "half": torch.randn(size, WIDTH).bfloat16(),
        "small": torch.randint(0, 5, (size,), dtype=torch.int16),
        "bytes": torch.randint(0, 255, (size, WIDTH), dtype=torch.uint8),
        "complex": torch.randn(size, WIDTH, dtype=torch.complex64),
        "target": torch.randn(size, WIDTH),
    }


def from_numbers(model: nn.Module, batch: Any) -> Tensor:
    x = batch["x"] + batch["bytes"].float() / 255
    out = model(x=x, late=batch["half"].float(), ids=batch["small"].long())
    return F.mse_loss(out + batch["double"].float() + batch["complex"].abs(), batch["target"])


def with_scalar(size: int) -> Any:
    """A tensor of no dimension, which every microbatch gets whole."""
    return {**dictionary(size), "scale": torch.tensor(0.7)}


def twice(size: int) -> Any:
    """One tensor as two leaves: an autoencoder's input and target."""
    x = torch.randn(size, WIDTH)
    return {"x": x, "target": x, "late": x[:, :1]}


FEATURES = [
    Feature("keywords", Late, keywords, dictionary, alone=True),
    Feature("constants", Late, keywords, constants, alone=True),
    Feature("nested", Late, from_nested, nested, alone=True),
    Feature("numbers", Late, from_numbers, numbers, alone=True),
    Feature("with-scalar", Late, keywords, with_scalar, alone=True),
    Feature("one-tensor-twice", Late, keywords, twice, alone=True),
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_batches(feature: Feature) -> None:
    check(feature)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_leaf_that_nothing_reads_has_as_many_rows_as_it_likes(rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    batch = {"x": torch.randn(8, 4), "seen": torch.arange(rows)}
    options: dict[str, Any] = {"workers": 2, "microbatches": 2, "schedule": "1f1b", "cost": "analytic"}
    build = fxpipe.compile(model, lambda net, batch: net(batch["x"]).square().mean(), batch, **options)
    assert not [warning for warning in build.warnings if "not proved" in warning]
