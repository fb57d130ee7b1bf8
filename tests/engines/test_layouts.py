"""Engines run parts whose kernels lay values out otherwise than torch's fake tensors foretell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import needs
from torch import Tensor, nn
from wrong_layouts import Middle, series, squared

import fxpipe


class Transposed(Middle):
    """Norms of transposed values, and rows picked by a transposed index, whose layout is uncertain."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = nn.BatchNorm1d(8)
        self.times = nn.LayerNorm(5)
        self.rows = torch.randperm(8).view(4, 2).t()

    def middle(self, x: Tensor) -> Tensor:
        y = self.times(self.batches(x).tanh()) + x
        return y.transpose(0, 1)[self.rows].flatten(0, 1).transpose(0, 1)


@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("inductor", marks=pytest.mark.slow)])
def test_engines_agree_with_the_emitted_code(engine: str) -> None:
    needs(engine)
    torch.manual_seed(0)
    build = fxpipe.compile(
        Transposed(), squared, series(), workers=2, schedule="1f1b", microbatches=2, cost="analytic", backend=engine
    )
    assert any("contiguous" in text for text in build.files.values())
    assert {name for stage in build.plan.stages for name in stage.engines} == {engine}

    def losses(backend: str) -> list[float]:
        def sgd(named: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for _, p in named], lr=0.1)

        pipeline = build.local(optimizer=sgd, backend=backend)
        return [pipeline.step(series()).item() for _ in range(3)]

    assert losses(engine) == pytest.approx(losses("eager"), rel=1e-5)
