"""A difference that float32's own rounding explains is accepted, with a note; a wrong gradient never is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import BatchError
from fxpipe.lowering import minibatch_loss
from fxpipe.lowering.agreement import FLOOR, TOLERANCE, Step, compare, worst_agreement
from fxpipe.lowering.compare_with_eager import SumOfMicrobatches, compare_with_eager
from fxpipe.lowering.own_rounding import THE_LOSS, in_float64, rounding_text, without_rounding

LIMIT = TOLERANCE[None]


def step(loss: float = 1.0, **gradients: list[float]) -> Step:
    return Step(
        torch.tensor(loss, dtype=torch.float64),
        {name: torch.tensor(values, dtype=torch.float64) for name, values in gradients.items()},
        {},
    )


def errors(found: Step, eager: Step, true: Step | None) -> dict[str, float]:
    agreement = without_rounding(compare(found, eager), found, eager, LIMIT, FLOOR, lambda: true)
    return {n: e for n, e in {THE_LOSS: agreement.loss, **agreement.gradients}.items() if e > LIMIT}


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
    assert agreement.largest <= LIMIT
    assert agreement.rounding["second.bias"] > LIMIT
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

    monkeypatch.setattr(minibatch_loss.SumOfMicrobatches, "add_gradient", wrong)
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
