"""Losses that torch translates wrongly in training graphs, and gradients that it lacks.

torch.onnx returns no total weight of `nll_loss`; torch's decompositions of the margin losses differ from their kernels
(`fxpipe/tracing/kernels.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_private import Decompositions

aten = torch.ops.aten


def _nll_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The loss and the divisor of the mean. Classes are the second axis, or the only one."""
    axis = 0 if x.ndim == 1 else 1
    valid = target != ignore_index
    # ONNX would count a negative class from the end: one that is out of range raises, as ATen does.
    safe = torch.where(valid, torch.where(target < 0, x.shape[axis], target), 0)
    loss = -x.gather(axis, safe.unsqueeze(axis)).squeeze(axis)
    weights = None if weight is None else weight.index_select(0, safe.reshape(-1)).reshape(safe.shape)
    counts = valid.to(x.dtype) if weights is None else weights * valid
    loss = torch.where(valid, loss if weight is None else loss * counts, 0.0)
    if reduction == 0 and x.ndim > 1:
        return loss, x.new_zeros(())
    total = counts.sum()
    return (loss.sum() / total if reduction == 1 else loss.sum()), total


def _reduced(rows: Tensor, reduction: int) -> Tensor:
    return rows if reduction == 0 else rows.mean() if reduction == 1 else rows.sum()


def _share(grad: Tensor, x: Tensor, reduction: int) -> Tensor:
    """For every row, the gradient of one entry of its loss: the entries are summed and divided by the classes."""
    rows = 1 if x.ndim < 2 or reduction != 1 else x.shape[0]
    grad = grad if reduction else grad.reshape(x.shape[:-1])
    return (grad / (x.shape[-1] * rows))[..., None]


class _Margin:
    """`multi_margin_loss`: how far every class except the true one is within its margin."""

    def __init__(self, x: Tensor, target: Tensor, p: Any, margin: Any, weight: Tensor | None) -> None:
        target = target.reshape(x.shape[:-1])[..., None]
        # ONNX would count a negative class from the end: one that is out of range raises, as ATen does.
        safe = torch.where(target < 0, x.shape[-1], target)
        self.true = target == torch.arange(x.shape[-1], device=x.device)
        self.weight = 1.0 if weight is None else weight.index_select(0, safe.reshape(-1)).reshape(safe.shape)
        over = margin - x.gather(-1, safe) + x
        self.over = torch.where((over > 0) & ~self.true, over, 0.0)
        self.square = p == 2

    def loss(self, reduction: int) -> Tensor:
        terms = self.over * self.over if self.square else self.over
        return _reduced((terms * self.weight).sum(-1) / self.over.shape[-1], reduction)

    def gradient(self, share: Tensor) -> Tensor:
        slope = 2 * self.over if self.square else (self.over > 0).to(self.over.dtype)
        slope = slope * self.weight * share
        return torch.where(self.true, -slope.sum(-1, keepdim=True), slope)


def _multi_margin(
    x: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    return _Margin(x, target, p, margin, weight).loss(reduction)


def _multi_margin_backward(
    grad: Tensor, x: Tensor, target: Tensor, p: Any, margin: Any, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    return _Margin(x, target, p, margin, weight).gradient(_share(grad, x, reduction))


class _Labels:
    """`multilabel_margin_loss`: how far other classes come within 1 of each label; labels end at the first −1."""

    def __init__(self, x: Tensor, target: Tensor) -> None:
        valid = (target == -1).to(torch.int64).cumsum(-1) == 0
        safe = torch.where(valid, torch.where(target < 0, x.shape[-1], target), 0)  # out of range raises, as in ATen
        self.places = (safe[..., None] == torch.arange(x.shape[-1], device=x.device)) & valid[..., None]
        self.true = self.places.to(x.dtype).sum(-2) > 0
        over = 1 - x.gather(-1, safe)[..., None] + x[..., None, :]
        self.over = torch.where((over > 0) & valid[..., None] & ~self.true[..., None, :], over, 0.0)

    def gradient(self, share: Tensor) -> Tensor:
        slope = (self.over > 0).to(self.over.dtype)
        pulled = (self.places.to(slope.dtype) * slope.sum(-1, keepdim=True)).sum(-2)
        return (slope.sum(-2) - pulled) * share


def _multilabel_margin(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    labels = _Labels(x, target)
    return _reduced(labels.over.sum((-1, -2)) / x.shape[-1], reduction), labels.true.to(x.dtype)


def _multilabel_margin_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, _: Tensor) -> Tensor:
    return _Labels(x, target).gradient(_share(grad, x, reduction))


TABLE: Decompositions = {
    aten.nll_loss_forward.default: _nll_forward,
    aten.nll_loss2d_forward.default: _nll_forward,
    aten.multi_margin_loss.default: _multi_margin,
    aten.multi_margin_loss_backward.default: _multi_margin_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin,
    aten.multilabel_margin_loss_backward.default: _multilabel_margin_backward,
}
