"""Activations' gradients and distances: entry by entry."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxpipe.torch_private import Decompositions

aten = torch.ops.aten


def _shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, grad)


def _cdist(a: Tensor, b: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    difference = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 1:
        return difference.sum(-1)
    if p == 2:
        return (difference * difference).sum(-1).sqrt()
    if p == math.inf:
        return difference.amax(-1)
    return (difference**p).sum(-1) ** (1 / p)


def _cdist_backward(grad: Tensor, a: Tensor, b: Tensor, p: float, cdist: Tensor) -> Tensor:
    if p not in (1.0, 2.0):
        raise NotImplementedError("the gradient of a distance of this norm")
    difference = a.unsqueeze(-2) - b.unsqueeze(-3)
    if p == 1:
        return (grad.unsqueeze(-1) * difference.sign()).sum(-2)
    share = torch.where(cdist == 0, 0.0, grad / torch.where(cdist == 0, 1.0, cdist))
    return (share.unsqueeze(-1) * difference).sum(-2)


def _relu(x: Tensor) -> Tensor:
    """onnxruntime has Relu only for floating point, and onnxscript's optimizer turns Max with 0 into Relu."""
    return NotImplemented if x.is_floating_point() else torch.where(x > 0, x, 0)


TABLE: Decompositions = {
    aten.relu.default: _relu,
    aten.softshrink_backward.default: _shrink_backward,
    aten.hardshrink_backward.default: _shrink_backward,
    aten._cdist_forward.default: _cdist,
    aten._cdist_backward.default: _cdist_backward,
}
