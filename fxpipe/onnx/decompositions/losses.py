"""Losses whose torch.onnx translation is wrong in training graphs: it gives no total weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


def _nll_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The loss and what the mean divides by. Classes are the second axis, or the only one."""
    axis = 0 if x.ndim == 1 else 1
    kept = target != ignore_index
    # ONNX would count a negative class from the end: one that is out of range raises, as ATen does.
    safe = torch.where(kept, torch.where(target < 0, x.shape[axis], target), 0)
    loss = -x.gather(axis, safe.unsqueeze(axis)).squeeze(axis)
    counts = kept.to(x.dtype) if weight is None else weight.index_select(0, safe.reshape(-1)).reshape(safe.shape) * kept
    loss = torch.where(kept, loss if weight is None else loss * counts, 0.0)
    if reduction == 0 and x.ndim > 1:
        return loss, x.new_zeros(())
    total = counts.sum()
    return (loss.sum() / total if reduction == 1 else loss.sum()), total


TABLE: dict[OpOverload, Callable[..., Any]] = {
    aten.nll_loss_forward.default: _nll_forward,
    aten.nll_loss2d_forward.default: _nll_forward,
}
