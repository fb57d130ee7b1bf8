"""Gradients of resizing and of padding: the transposed matrices along the axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fxpipe.onnx.decompositions.linear_maps import along, matrix, sum_runs
from fxpipe.torch_private import Decompositions, OpOverload

aten = torch.ops.aten


def _nearest(
    axes: int,
    along_one: OpOverload,
    grad: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    *scales: float | None,
) -> Tensor:
    sizes, out_sizes = list(input_size)[-axes:], list(output_size)
    if all(m % s == 0 for m, s in zip(out_sizes, sizes, strict=True)) and not _odd(scales, sizes, out_sizes):
        return sum_runs(grad, [m // s for m, s in zip(out_sizes, sizes, strict=True)])
    return along(grad, _matrices(lambda x, m, s: along_one(x, [m], s), sizes, out_sizes, scales, grad.dtype))


def _linear(
    axes: int,
    grad: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> Tensor:
    op = aten.upsample_linear1d.default
    sizes, out_sizes = list(input_size)[-axes:], list(output_size)
    return along(grad, _matrices(lambda x, m, s: op(x, [m], align_corners, s), sizes, out_sizes, scales, grad.dtype))


def _cubic(
    grad: Tensor, output_size: Sequence[int], input_size: Sequence[int], align_corners: bool, *scales: float | None
) -> Tensor:
    def one(x: Tensor, out_size: int, scale: float | None) -> Tensor:
        # On planes whose other axis has one entry it acts along one axis.
        return aten.upsample_bicubic2d.default(x[:, :, None], [1, out_size], align_corners, None, scale)[:, :, 0]

    return along(grad, _matrices(one, list(input_size)[-2:], list(output_size), scales, grad.dtype))


def _odd(scales: Sequence[float | None], sizes: Sequence[int], out_sizes: Sequence[int]) -> bool:
    """Whether a scale is given that is not the quotient of the sizes."""
    return any(f is not None and f != m / s for f, s, m in zip(scales, sizes, out_sizes, strict=False))


def _matrices(
    apply: Callable[[Tensor, int, float | None], Tensor],
    sizes: Sequence[int],
    out_sizes: Sequence[int],
    scales: Sequence[float | None],
    dtype: torch.dtype,
) -> list[Tensor]:
    """The transposed matrix of each axis."""
    factors = list(scales) if scales else [None] * len(sizes)
    return [
        matrix(partial(lambda m, f, x: apply(x, m, f), m, f), s, dtype).t()
        for s, m, f in zip(sizes, out_sizes, factors, strict=True)
    ]


def _padding(axes: int, mode: str, grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    pairs = list(zip(padding[::2], padding[1::2], strict=True))[::-1]  # the last axis comes first
    matrices = [
        matrix(partial(F.pad, pad=p, mode=mode), size, grad.dtype).t() if any(p) else None
        for size, p in zip(x.shape[-axes:], pairs, strict=True)
    ]
    return along(grad, matrices)


TABLE: Decompositions = {
    aten.upsample_nearest1d_backward.default: partial(_nearest, 1, aten.upsample_nearest1d.default),
    aten.upsample_nearest2d_backward.default: partial(_nearest, 2, aten.upsample_nearest1d.default),
    aten.upsample_nearest3d_backward.default: partial(_nearest, 3, aten.upsample_nearest1d.default),
    aten._upsample_nearest_exact1d_backward.default: partial(_nearest, 1, aten._upsample_nearest_exact1d.default),
    aten._upsample_nearest_exact2d_backward.default: partial(_nearest, 2, aten._upsample_nearest_exact1d.default),
    aten._upsample_nearest_exact3d_backward.default: partial(_nearest, 3, aten._upsample_nearest_exact1d.default),
    aten.upsample_linear1d_backward.default: partial(_linear, 1),
    aten.upsample_bilinear2d_backward.default: partial(_linear, 2),
    aten.upsample_trilinear3d_backward.default: partial(_linear, 3),
    aten.upsample_bicubic2d_backward.default: _cubic,
    aten.replication_pad1d_backward.default: partial(_padding, 1, "replicate"),
    aten.replication_pad2d_backward.default: partial(_padding, 2, "replicate"),
    aten.replication_pad3d_backward.default: partial(_padding, 3, "replicate"),
    aten.reflection_pad1d_backward.default: partial(_padding, 1, "reflect"),
    aten.reflection_pad2d_backward.default: partial(_padding, 2, "reflect"),
    aten.reflection_pad3d_backward.default: partial(_padding, 3, "reflect"),
}
