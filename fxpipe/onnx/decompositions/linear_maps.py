"""Linear maps along axes: pooling by means, resizing and padding are a small constant matrix for each axis.

Their gradients are the same with the matrices transposed; ATen's own kernels for them have no counterpart in ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fxpipe.torch_private import disable_current_modes

T = TypeVar("T")


def constant(make: Callable[[], T]) -> T:
    """Tensors with values, computed now instead of traced."""
    with disable_current_modes(), torch.no_grad():
        return make()


def matrix(apply: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] of a linear map on tensors [1, in, size-of-axis], found by applying it to unit vectors."""
    return constant(lambda: apply(torch.eye(size, dtype=torch.float64)[None])[0].t().contiguous()).to(dtype)


def along(x: Tensor, matrices: Sequence[Tensor | None]) -> Tensor:
    """Apply to each of the last axes its matrix [out, in]; None leaves an axis unchanged."""
    first = x.ndim - len(matrices)
    for i, m in enumerate(matrices):
        if m is None:
            continue
        axis = first + i
        if axis == x.ndim - 1:
            x = x @ m.t()
        elif axis == x.ndim - 2:
            x = m @ x
        else:
            tail = x.shape[axis + 1 :]
            flat = m @ x.reshape(*x.shape[: axis + 1], -1)
            x = flat.reshape(*flat.shape[:-1], *tail)
    return x


def repeat(x: Tensor, factors: Sequence[int]) -> Tensor:
    """Each entry of the last axes, repeated this many times in a row."""
    first = x.ndim - len(factors)
    sizes, wide = list(x.shape[:first]), list(x.shape[:first])
    for size, factor in zip(x.shape[first:], factors, strict=True):
        sizes += [size, 1]
        wide += [size, factor]
    ends = [size * factor for size, factor in zip(x.shape[first:], factors, strict=True)]
    return x.reshape(sizes).expand(wide).reshape(*x.shape[:first], *ends)


def sum_runs(x: Tensor, factors: Sequence[int]) -> Tensor:
    """The sum over runs of this many entries of each of the last axes."""
    first = x.ndim - len(factors)
    sizes = list(x.shape[:first])
    axes = []
    for size, factor in zip(x.shape[first:], factors, strict=True):
        sizes += [size // factor, factor]
        axes.append(len(sizes) - 1)
    return x.reshape(sizes).sum(axes)
