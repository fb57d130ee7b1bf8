"""`params="bf16"`: casts of float32 parameters, and the gradients, buffers and refusals that come with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import FxpipeError
from fxpipe.ir.program import Program, info
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.task.meta import on_meta

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).bfloat16()


class Net(nn.Module):
    """A table that is added, a frozen layer, running statistics, and a weight with two uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("table", torch.randn(4))
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.norm(self.first(x) + self.table)))


def squared(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def narrowed(model: nn.Module) -> Net:
    """The same in bfloat16, but for the batch norm."""
    made = copy.deepcopy(model).bfloat16()
    made.norm.float()
    return made


@pytest.fixture(scope="module")
def program() -> Program:
    return fxpipe.capture(Net(), squared, BATCH, params="bf16")


def results(program: Program) -> dict[str, Tensor]:
    """Gradients and new values, by the names of parameters and buffers."""
    found = zip(program.outputs, program.run(), strict=True)
    return {output.target: value for output, value in found if output.kind in ("gradient", "buffer")}


def test_gradients_are_those_of_the_model_in_bfloat16_as_float32() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    found = results(fxpipe.capture(model, squared, BATCH, params="bf16"))
    same = narrowed(model)
    squared(same, BATCH).backward()
    for name, parameter in same.named_parameters():
        if parameter.grad is not None:
            gradient = found[name.replace(".", "_")]
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, parameter.grad.float()), name
    assert torch.equal(found["norm_running_var"], same.norm.running_var)
    assert all(v.dtype == before[n].dtype and torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_what_is_kept_in_which_type(program: Program) -> None:
    values = program.values
    narrow = {name for name, value in values.items() if value.dtype == torch.bfloat16}
    assert narrow == {"table", "frozen_weight", "frozen_bias"}
    assert torch.equal(values["first_weight"], Net().first.weight)


def test_a_model_in_bfloat16_keeps_its_types_and_gets_float32_parameters() -> None:
    model = narrowed(Net())
    model.table = model.table.float()  # a type that it has chosen
    model.forward = lambda x: model.last(model.first(x) * model.table.to(x.dtype))  # type: ignore[method-assign]
    program = fxpipe.capture(model, squared, BATCH, params="bf16")
    kept = {name: value.dtype for name, value in program.values.items()}
    assert kept["first_weight"] == kept["table"] == torch.float32
    assert kept["frozen_weight"] == torch.bfloat16
    assert torch.equal(program.values["first_weight"], model.first.weight.float())
    assert model.first.weight.dtype == torch.bfloat16
    assert not any("rounds" in warning for warning in program.warnings)


def test_each_module_has_its_own_cast(program: Program) -> None:
    users = program.placeholders["first_weight"].users
    assert sorted(info(node).module for node in users) == ["first", "last"]


def test_stages_agree_with_eager_pytorch_which_is_left_as_it_was() -> None:
    model = Net()
    build = fxpipe.compile(
        model, squared, BATCH, workers=2, schedule="1f1b", microbatches=2, cost="analytic", params="bf16"
    )
    agreement = compare_with_eager(build, model, squared, BATCH)
    assert agreement.largest < 1e-4
    assert "the loss" in agreement.rounding
    assert {p.tensor.dtype for p in build.plan.parameters if p.trained} == {"float32"}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.grad is None for p in model.parameters())


def test_hooks_see_gradients_in_bfloat16(program: Program) -> None:
    model, plain = Net(), results(program)
    model.first.bias.register_hook(lambda gradient: 2 * gradient if gradient.dtype == torch.bfloat16 else gradient)
    hooked = results(fxpipe.capture(model, squared, BATCH, params="bf16"))
    assert torch.equal(hooked["first_bias"], 2 * plain["first_bias"])


def test_buffers_that_are_rounded_are_named(program: Program) -> None:
    """An average that small changes cannot move, frequencies that positions are multiplied with."""
    (warning,) = program.warnings
    assert warning.startswith("--params bf16 rounds table, also what")


class Clamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=4.6)
        return x * self.scale


@pytest.mark.parametrize(
    ("model", "batch", "options", "says"),
    [
        (Clamps(), BATCH, {}, "changes parameter scale in place"),
        (Net().double(), BATCH, {}, "first.weight (float64)"),
        (nn.Linear(4, 4, dtype=torch.complex64), BATCH, {}, "weight (complex64)"),
        (nn.Linear(4, 4).half(), BATCH, {}, "weight (float16)"),
        (Net(), BATCH.float(), {}, "x.to(layer.weight.dtype)"),
        (Net(), BATCH, {"autocast": "bf16"}, "--params bf16 and --autocast bf16"),
        (Net(), BATCH, {"params": "fp8"}, "params='fp8' is not one of bf16"),
    ],
)
def test_what_makes_no_sense_is_refused(model: nn.Module, batch: Tensor, options: dict[str, Any], says: str) -> None:
    with pytest.raises(FxpipeError) as caught:
        fxpipe.compile(model, squared, batch, **{"params": "bf16", "cost": "analytic", **options})
    assert says in f"{caught.value.what} {caught.value.hint}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_without_values_has_float32_parameters(dtype: torch.dtype) -> None:
    model = on_meta(lambda: nn.Linear(4, 4, dtype=dtype)).model
    program = fxpipe.capture(model, squared, BATCH, params="bf16")
    assert {(v.dtype, v.device.type) for v in program.values.values()} == {(torch.float32, "meta")}
