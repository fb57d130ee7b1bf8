"""scale_loss: the gradients are multiplied by a leaf of the batch, the loss and the buffers are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import TaskError
from fxpipe.ir.law import verify
from fxpipe.ir.program import Program, info
from fxpipe.passes.fold import Fold
from fxpipe.passes.scale_loss import ScaleLoss
from fxpipe.passes.whole_loss import WholeLoss


class Net(nn.Module):
    """A linear layer and a batch norm, so that there are new values of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def captured(dtype: torch.dtype = torch.float32) -> Program:
    torch.manual_seed(0)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean().to(dtype)

    return Fold()(fxpipe.capture(Net(), loss, torch.randn(8, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_gradients_are_scaled_and_nothing_else(dtype: torch.dtype) -> None:
    program = captured(dtype)
    scaled = ScaleLoss()(program)
    verify(scaled)
    assert [b.leaf.name for b in scaled.batch] == ["batch", "loss_scale"]
    assert "loss_scale" not in program.placeholders, "the program that was given is as it was"
    (made,) = scaled.placeholders["loss_scale"].users
    assert info(made).phase == "B"
    one, many = program.run(), scaled.run(batch={"loss_scale": torch.tensor(64.0)})
    kinds = {output.kind for output in program.outputs}
    assert kinds == {"loss", "gradient", "buffer"}
    for output, before, after in zip(program.outputs, one, many, strict=True):
        factor = 64 if output.kind == "gradient" else 1
        assert torch.equal(before * factor if factor > 1 else before, after), output


def test_a_weighted_loss_is_scaled_too() -> None:
    torch.manual_seed(0)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).logsumexp(0).logsumexp(0)

    program = Fold()(fxpipe.capture(nn.Linear(4, 4), loss, torch.randn(8, 4)))
    weighted = WholeLoss(2, weighted=True, checked=True)(program)
    scaled = ScaleLoss()(weighted)
    verify(scaled)
    (alone, *plain), (kept, *both) = (
        weighted.run(batch={"loss_weight": torch.tensor(2.0)}),
        scaled.run(batch={"loss_weight": torch.tensor(2.0), "loss_scale": torch.tensor(8.0)}),
    )
    assert torch.equal(alone, kept)
    assert all(torch.equal(8 * one, other) for one, other in zip(plain, both, strict=True))


def test_parameters_of_float16_are_refused() -> None:
    model = nn.Linear(4, 4).half()
    program = Fold()(fxpipe.capture(model, lambda m, x: m(x.half()).float().mean(), torch.randn(8, 4)))
    with pytest.raises(TaskError, match="these are float16: weight, bias"):
        ScaleLoss()(program)
