"""What crosses workers, and how it lies in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.agreement import compare_with_eager


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Queries, keys and values are views with gaps; attention's output lies as its query does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.core = Core()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, w // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(self.core(q, k, v).transpose(1, 2).reshape(b, t, w))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(("forward", "backward"), [("core", "core"), ("core", "out"), ("out", "core")])
def test_views_with_gaps_keep_the_order_of_their_dimensions(forward: str, backward: str) -> None:
    torch.manual_seed(0)
    model, batch = Attention(), torch.randn(4, 6, 8)
    build = fxpipe.compile(
        model,
        loss,
        batch,
        workers=2,
        microbatches=2,
        schedule="1f1b",
        cost="analytic",
        forward_at=[forward],
        backward_at=[backward],
    )
    assert compare_with_eager(build, model, loss, batch).largest < 1e-5
    pipeline = build.local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    losses = [float(pipeline.step(batch)) for _ in range(4)]
    assert losses[0] == pytest.approx(loss(model, batch).item(), rel=1e-5)
    assert losses[-1] < losses[0]
