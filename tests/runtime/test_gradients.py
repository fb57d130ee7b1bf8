"""Gradients are added up over microbatches and replicas; those of 16 bits, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.plan.spec import TensorSpec
from fxpipe.runtime.worker.gradients import GradientSum

COUNT = 64


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def batch(dtype: torch.dtype) -> Any:
    return torch.randn(512, 8, generator=torch.Generator().manual_seed(1)).to(dtype), torch.arange(512) % 4


def true_gradients() -> dict[str, Tensor]:
    """In float64, of the weights and the batch that bfloat16 has."""
    exact = model(torch.bfloat16).double()
    x, y = batch(torch.bfloat16)
    F.cross_entropy(exact(x.double()), y).backward()
    return {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}


def error(microbatches: int, **more: Any) -> float:
    build = fxpipe.compile(
        model(torch.bfloat16),
        loss,
        batch(torch.bfloat16),
        workers=2,
        schedule="1f1b",
        microbatches=microbatches,
        cost="analytic",
        **more,
    )
    with build.local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1)) as run:
        run.step(batch(torch.bfloat16))
        found, true = run.gradients(), true_gradients()
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
    return max(((found[n].double() - g).norm() / g.norm()).item() for n, g in true.items())


def test_more_microbatches_do_not_make_bfloat16_worse() -> None:
    assert error(COUNT) < 1.2 * error(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_addends_are_not_lost(dtype: torch.dtype) -> None:
    """In bfloat16, 256 + 1 is 256."""
    parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
    sums = GradientSum([parameter], [0], 1)
    first, small = torch.tensor([2048.0], dtype=dtype), torch.tensor([0.75], dtype=dtype)
    for gradient in (first, *[small] * 400):
        sums.add([gradient.clone()], set())
    sums.close(0)
    (found,) = sums.take()
    assert found is not None
    assert torch.equal(found, torch.tensor([2348.0]).to(dtype))


def test_a_sum_of_16_bits_takes_4_bytes() -> None:
    assert [TensorSpec((3, 5), (5, 1), dtype).sum_bytes for dtype in ("bfloat16", "float32", "float64")] == [
        60,
        60,
        120,
    ]


def test_replicas_add_up_float32() -> None:
    """Their laws are in tests/law (precision=bfloat16)."""
    build = fxpipe.compile(
        model(torch.bfloat16), loss, batch(torch.bfloat16), workers=1, dp=2, schedule="1f1b", microbatches=4
    )
    (bucket,) = build.plan.stages[0].buckets
    assert bucket.bytes == 4 * sum(p.numel() for p in model(torch.bfloat16).parameters())
