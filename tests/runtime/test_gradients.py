"""Gradients are added up over microbatches and replicas; those of 16 bits, in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.plan.spec import TensorSpec
from fxpipe.runtime.worker.gradients import GradientSum


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
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    batch, options = torch.randn(512, 8).bfloat16(), {"workers": 1, "dp": 2, "schedule": "1f1b", "microbatches": 4}
    build = fxpipe.compile(model, lambda net, x: net(x).float().square().mean(), batch, **options)
    (bucket,) = build.plan.stages[0].buckets
    assert bucket.bytes == 4 * sum(p.numel() for p in model.parameters())
