"""as_strided where it is a plain view: ONNX's tensors have no strides."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def plain_view(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """`as_strided` of a tensor that is its whole storage, in order: by permuting, slicing and expanding it."""
    if any(s == 0 for s in size):
        return x.new_zeros(size)
    held = x.stride()
    order = sorted(range(x.ndim), key=lambda d: (-held[d], d))
    expected = 1
    for d in reversed(order):
        if x.shape[d] != 1 and held[d] != expected:
            raise NotImplementedError("as_strided of a tensor that is itself a view with gaps")
        expected *= x.shape[d]
    flat = x.permute(order).reshape(-1)
    offset = (storage_offset or 0) - (x.storage_offset() if storage_offset is not None else 0)
    # Each axis from the outermost: a row of the remainder, taken in steps.
    axes = sorted((d for d in range(len(size)) if size[d] > 1 and stride[d] > 0), key=lambda d: -stride[d])
    reach = sum((size[d] - 1) * stride[d] for d in axes) + 1
    for outer, inner in itertools.pairwise(axes):
        if stride[outer] % stride[inner] or stride[outer] < size[inner] * stride[inner]:
            raise NotImplementedError("as_strided that is not a slice or permutation")
    part = flat[offset : offset + reach]
    if part.shape[0] != reach:
        raise NotImplementedError("as_strided beyond the tensor")
    for d in axes:
        # Pad to whole steps, and keep the start of each.
        count, step = size[d], stride[d]
        inner = 1 + sum((size[e] - 1) * stride[e] for e in axes if stride[e] < step)
        width = part.shape[-1]
        if count * step > width:
            part = _padded(part, count * step - width)
        part = part.reshape(*part.shape[:-1], count, step)[..., :inner]
    part = part.reshape([size[d] for d in axes])
    part = part.permute([axes.index(d) for d in sorted(axes)])
    full = part.reshape([size[d] if d in axes else 1 for d in range(len(size))])
    return full.expand(list(size))


def _padded(x: Tensor, more: int) -> Tensor:
    return torch.cat([x, x.new_zeros((*x.shape[:-1], more))], -1)
