"""A captured step runs the kernels that eager PyTorch runs, also where torch's tracer would put other code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_steps import captured, differences
from torch import Tensor
from torch.nn import functional as F

from fxpipe.tracing import kernels

aten = torch.ops.aten
SCORES = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[3, -1, 0, 1, 2], [0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], [1, 1, -1, 0, 0]])
CLASSES = torch.tensor([1, 0, 4, 4])
IMAGES = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))


def targets(function: Any, *tensors: Tensor) -> set[Any]:
    return {node.target for node in captured(function, tensors[:1], tensors[1:])[0].graph.nodes}


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_resizing_is_one_operator(mode: str) -> None:
    def resized(images: Tensor) -> Tensor:
        return F.interpolate(images, scale_factor=1.7, mode=mode)

    kernel = "_upsample_nearest_exact2d" if mode == "nearest-exact" else f"upsample_{mode}2d"
    assert {getattr(aten, kernel).default, getattr(aten, f"{kernel}_backward").default} <= targets(resized, IMAGES)
    assert not differences(resized, [IMAGES])


def test_classes_may_be_bytes() -> None:
    classes = torch.tensor([1, 255, 4, 0], dtype=torch.uint8)
    assert not differences(lambda x, t: F.cross_entropy(x, t, ignore_index=255), [SCORES], [classes])


def test_torch_is_left_as_it_was() -> None:
    before = {operator: dict(operator.py_kernels) for operator in kernels.replaced()}
    assert aten.multilabel_margin_loss_forward.default in before
    with kernels.traced():
        assert not kernels.replaced()
    assert {operator: dict(operator.py_kernels) for operator in kernels.replaced()} == before
