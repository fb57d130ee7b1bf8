"""A difference that float32's own rounding explains is accepted, with a note; a wrong gradient never is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.errors import BatchError
from fxpipe.lowering.agreement import Step, agreement_of, worst_agreement
from fxpipe.lowering.compare_with_eager import SumOfMicrobatches, compare_with_eager
from fxpipe.lowering.own_rounding import THE_LOSS, Exact, in_float64, rounding_text, without_rounding
from fxpipe.stages.compare import EXACT, FLOOR


def step(loss: float = 1.0, **gradients: list[float]) -> Step:
    return Step(
        torch.tensor(loss, dtype=torch.float64),
        {name: torch.tensor(values, dtype=torch.float64) for name, values in gradients.items()},
        {},
    )


def errors(found: Step, eager: Step, true: Step | None) -> dict[str, float]:
    agreement = without_rounding(agreement_of(found, eager), found, eager, EXACT, FLOOR, lambda: true and Exact(true))
    return {n: e for n, e in {THE_LOSS: agreement.loss, **agreement.gradients}.items() if e > EXACT}


BIG = [100.0, 100.0]


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        (step(a=[0.001], b=BIG), []),  # as far from the true value, on its other side
        (step(a=[0.004], b=BIG), ["a"]),  # four times as far
        (step(a=[-0.001], b=[100.0, 101.0]), ["b"]),
        (step(a=[0.001], b=[100.0, 101.0]), ["b"]),  # what is rounding hides nothing else
        (step(2.0, a=[0.001], b=BIG), [THE_LOSS]),
        (step(a=[math.nan], b=BIG), ["a"]),
        (step(b=BIG), ["a"]),
    ],
)
def test_only_what_is_as_near_as_eager_is_rounding(found: Step, refused: list[str]) -> None:
    """Eager's gradient of `a` is 0.001 from the true one, which is zero."""
    assert list(errors(found, step(a=[-0.001], b=BIG), step(a=[0.0], b=BIG))) == refused


@pytest.mark.parametrize(
    "true",
    [
        None,
        step(a=[0.0], b=[200.0, 0.0]),  # another step, as with other random numbers
        step(9.0, a=[0.0], b=BIG),
        step(b=BIG),
        step(a=[0.0], b=[math.nan, 0.0]),
        step(a=[0.5], b=BIG),  # eager's own value is no value at all
    ],
)
def test_a_step_in_float64_that_is_another_step_explains_nothing(true: Step | None) -> None:
    assert list(errors(step(a=[0.001], b=BIG), step(a=[-0.001], b=BIG), true)) == ["a"]


class Cancels(nn.Module):
    """Of its last bias, the gradient is a sum whose terms cancel, and larger ones than those of any other gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(1e-3 * self.first(x).tanh())


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, scale = batch
    return 1 + (model(x) * scale).mean()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    scale = 300 * torch.randn(500, 64)
    return torch.randn(500, 4), scale - scale.mean(0)


ASKED: dict[str, Any] = {"workers": 2, "schedule": "1f1b", "microbatches": 2, "cost": "analytic"}


def test_a_gradient_that_is_zero_but_for_rounding_is_no_reason_to_refuse() -> None:
    model = Cancels()
    build = fxpipe.compile(model, loss, batch(), **ASKED)
    (note,) = [w for w in build.warnings if "rounding" in w]
    assert "the gradient of second.bias" in note
    agreement = compare_with_eager(build, model, loss, batch())
    assert agreement.largest <= EXACT
    assert agreement.rounding["second.bias"] > EXACT
    assert "second.bias" in rounding_text(worst_agreement([agreement]))
    assert model.second.bias.dtype == torch.float32


def test_a_wrong_stage_is_found_where_another_gradient_is_rounding() -> None:
    model = Cancels()
    build = fxpipe.compile(model, loss, batch(), **ASKED)
    wrong = {
        name: text.replace("aten.tanh_backward.default(", "aten.sigmoid_backward.default(")
        for name, text in build.files.items()
    }
    assert wrong != build.files
    agreement = compare_with_eager(dataclasses.replace(build, files=wrong), model, loss, batch())
    assert agreement.gradients["first.weight"] > 1e-2
    assert "first.weight" not in agreement.rounding


def test_a_wrong_gradient_is_refused_where_another_is_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    add = SumOfMicrobatches.add_gradient

    def wrong(self: SumOfMicrobatches, name: str, value: Tensor) -> None:
        add(self, name, 1.001 * value if name == "first.weight" else value)

    monkeypatch.setattr(SumOfMicrobatches, "add_gradient", wrong)
    with pytest.raises(BatchError, match=r"the gradient of first\.weight differs by"):
        fxpipe.compile(Cancels(), loss, batch(), **ASKED)


def test_what_has_no_float64_has_no_exact_step() -> None:
    def made(model: nn.Module, batch: Any) -> Step:
        return step(float(model(batch).sum().detach()))

    def fails(model: nn.Module, batch: Any) -> Step:
        raise RuntimeError("no kernel")

    model = nn.Linear(3, 1)
    before = torch.get_default_dtype()
    assert in_float64(made, model, torch.ones(2, 3)) is not None
    assert in_float64(fails, model, torch.ones(2, 3)) is None
    assert in_float64(made, nn.Linear(3, 1).double(), torch.ones(2, 3)) is None
    assert torch.get_default_dtype() == before


class Narrow(nn.Sequential):
    """Values of 16 bits, in one of the ways in which models have them."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self.way = way
        if way == "weights":
            self.bfloat16()
        elif way == "float16":
            self.half()
        elif way == "mixed":
            self[1].bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "autocast in forward":
            with torch.autocast("cpu", torch.bfloat16):
                return self._layers(x).float()
        return self._layers(x).float()

    def _layers(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.tanh(layer(x if self.way.startswith("autocast") else x.to(layer.weight.dtype)))
        return x


WAYS = ["weights", "float16", "mixed", "autocast in forward", "autocast"]


def narrow(way: str) -> Any:
    pairs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 8
    autocast = "bf16" if way == "autocast" else None
    options = {"workers": 2, "schedule": "1f1b", "microbatches": 8, "cost": "analytic", "autocast": autocast}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Narrow(way), loss, pairs, options


@pytest.mark.parametrize("way", WAYS)
def test_rounding_to_16_bits_is_no_fault_and_hides_none(way: str) -> None:
    model, loss, batch, options = narrow(way)
    build = fxpipe.compile(model, loss, batch, **options)
    agreement = compare_with_eager(build, model, loss, batch)
    assert agreement.largest <= EXACT
    assert agreement.rounding
    scaled = {
        name: text.replace("aten.tanh_backward.default(", "1.01 * aten.tanh_backward.default(", 1)
        for name, text in build.files.items()
    }
    assert scaled != build.files
    agreement = compare_with_eager(dataclasses.replace(build, files=scaled), model, loss, batch)
    assert agreement.worst[1] > EXACT, "a fault of 1%, which is less than bfloat16's rounding of some gradients"
    assert "in float64, where nothing is rounded" in agreement.cause


def test_dropout_that_backward_draws_again_is_compared_without_draws() -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(
                lambda x: nn.functional.dropout(torch.tanh(self[0](x)), 0.5),
                x,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            return self[1](hidden)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model, batch = Net(nn.Linear(4, 8), nn.Linear(8, 2)), (torch.randn(8, 4), torch.arange(8) % 2)
    for microbatches in (1, 2):
        build = fxpipe.compile(model, loss, batch, **{**ASKED, "microbatches": microbatches})
        agreement = compare_with_eager(build, model, loss, batch)
        assert agreement.largest <= EXACT
        assert "preserve_rng_state=False" in agreement.notes[0]
        wrong = {
            name: text.replace("aten.tanh_backward.default(", "aten.sigmoid_backward.default(")
            for name, text in build.files.items()
        }
        assert compare_with_eager(dataclasses.replace(build, files=wrong), model, loss, batch).largest > EXACT
