"""Windows, diagonals, products that run along an axis, rows of tables, and indices of 32 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.onnx.decompositions.linear_maps import constant
from fxpipe.torch_private import Decompositions, OpOverload

aten = torch.ops.aten
_CHECKED = -2  # a padding index, which the forward ignores: it marks our own call


def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """ONNX would count a negative index from the end: an index out of range raises, as in ATen."""
    if padding_idx == _CHECKED:
        return NotImplemented
    rows = torch.where(indices < 0, weight.shape[0], indices)
    return aten.embedding.default(weight, rows, _CHECKED)


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    x = (x if dtype is None else x.to(dtype)).movedim(dim, -1)
    reads = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril()
    return torch.where(reads, x.unsqueeze(-2), 1).prod(-1).movedim(-1, dim)


def _diagonal_backward(grad: Tensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    rows, columns, count = input_sizes[dim1], input_sizes[dim2], grad.shape[-1]
    right, down = max(offset, 0), max(-offset, 0)
    places = torch.arange(count, device=grad.device).unsqueeze(-1) + right
    here = places == torch.arange(columns, device=grad.device)
    full = torch.where(here, grad.unsqueeze(-1), 0.0)
    full = torch.constant_pad_nd(full, [0, 0, down, rows - count - down])
    return full.movedim((-2, -1), (dim1 % len(input_sizes), dim2 % len(input_sizes)))


def _unfold_backward(grad: Tensor, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Tensor:
    dim, length = dim % len(input_sizes), input_sizes[dim]
    # [windows * size, length]: the entry at each place of each window.
    places = constant(lambda: torch.eye(length).unfold(1, size, step).reshape(length, -1).t().contiguous())
    return (grad.movedim(dim, -2).flatten(-2) @ places.to(grad.dtype)).movedim(-1, dim)


def _with_long_indices(op: OpOverload, x: Tensor, indices: Sequence[Tensor | None], *more: Any) -> Tensor:
    if all(i is None or i.dtype is not torch.int32 for i in indices):
        return NotImplemented
    wide = [i.long() if i is not None and i.dtype is torch.int32 else i for i in indices]
    return op(x, wide, *more)


def _scatter_mean(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """The mean, because torch.onnx sums here and does not divide."""
    if reduce != "mean" or not x.is_floating_point():
        return NotImplemented
    nothing = torch.zeros_like(x)
    count = nothing.scatter_add(dim, index, nothing.new_ones(index.shape))
    total = nothing.scatter_add(dim, index, source)
    return (x + total) / (1 + count) if include_self else torch.where(count > 0, total / count.clamp(min=1), x)


def _of_bools(op: OpOverload, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if x.dtype is not torch.bool:
        return NotImplemented
    values, indices = op(x.int(), dim, keepdim)
    return values.bool(), indices


TABLE: Decompositions = {
    aten.cumprod.default: _cumprod,
    aten.embedding.default: _embedding,
    aten.max.dim: partial(_of_bools, aten.max.dim),
    aten.min.dim: partial(_of_bools, aten.min.dim),
    aten.scatter_reduce.two: _scatter_mean,
    aten.unfold_backward.default: _unfold_backward,
    aten.index.Tensor: partial(_with_long_indices, aten.index.Tensor),
    aten.index_put.default: partial(_with_long_indices, aten.index_put.default),
    aten.diagonal_backward.default: _diagonal_backward,
}
