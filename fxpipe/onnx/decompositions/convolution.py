"""Gradients of convolutions, and transposed ones that ONNX's runtimes refuse."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from fxpipe.torch_private import Decompositions

aten = torch.ops.aten
_FEW = 16  # channels: with fewer, a product for each place of the kernel is too small to be efficient
_SMALL = 64  # outputs of a plane: the same


def _forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    axes = w.ndim - 2
    step, pad, over = (list(v) * axes if len(v) == 1 else list(v) for v in (stride, padding, output_padding))
    if not transposed or all(o < s for o, s in zip(over, step, strict=True)):
        return NotImplemented
    # onnxruntime takes only an output padding below the stride: make the full output, then take its part.
    full = aten.convolution.default(x, w, None, stride, [0] * axes, dilation, True, [0] * axes, groups)
    ends = [n for p, o in zip(reversed(pad), reversed(over), strict=True) for n in (-p, o - p)]
    out = torch.constant_pad_nd(full, ends)
    return out if bias is None else out + bias.reshape(-1, *[1] * axes)


def _backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    axes = x.ndim - 2
    stride, padding, dilation = (list(v) * axes if len(v) == 1 else list(v) for v in (stride, padding, dilation))
    dx = dw = db = None
    if output_mask[0]:
        if transposed:
            dx = aten.convolution.default(grad, w, None, stride, padding, dilation, False, [0] * axes, groups)
            for axis in range(2, x.ndim):  # an output padding of a stride or more makes it longer
                if dx.shape[axis] > x.shape[axis]:
                    dx = dx.narrow(axis, 0, x.shape[axis])
        else:
            dx = _input(grad, x, w, stride, padding, dilation, groups)
    if output_mask[1]:
        # A transposed convolution is the backward of a plain one: the two swap roles.
        pair = (x, grad) if transposed else (grad, x)
        dw = _weight(*pair, w, stride, padding, dilation, groups)
    if output_mask[2]:
        db = grad.sum([0, *range(2, grad.ndim)])
    return dx, dw, db


def _input(
    grad: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    axes = x.ndim - 2
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
    plain = stride == [1] * axes and all(r >= p for r, p in zip(reach, padding, strict=True))
    if plain and w.numel() <= grad.numel() and x.shape[1] >= _FEW:
        # A plain convolution with the weight flipped: its kernels are better than those of ConvTranspose, unless the
        # flip is most of the work.
        turned = w.reshape(groups, w.shape[0] // groups, *w.shape[1:]).transpose(1, 2)
        turned = turned.reshape(-1, w.shape[0] // groups, *w.shape[2:])
        if max(w.shape[2:]) > 1:
            turned = turned.flip(list(range(2, w.ndim)))
        pad = [r - p for r, p in zip(reach, padding, strict=True)]
        return aten.convolution.default(grad, turned, None, stride, pad, dilation, False, [0] * axes, groups)
    sizes = [(g - 1) * s - 2 * p + r + 1 for g, s, p, r in zip(grad.shape[2:], stride, padding, reach, strict=True)]
    over = [size - m for size, m in zip(x.shape[2:], sizes, strict=True)]
    return aten.convolution.default(grad, w, None, stride, padding, dilation, True, over, groups)


def _weight(
    grad: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """For each place of the kernel: the entries of x that it touched, times grad, over samples and places at once."""
    n = x.shape[0]
    sizes = list(grad.shape[2:])
    per, entries = grad.shape[1] // groups, w.shape[1]
    if any(padding):
        x = torch.constant_pad_nd(x, [p for p in reversed(padding) for _ in range(2)])
    places = list(product(*map(range, w.shape[2:])))
    if groups > 1 or len(places) == 1:
        left = grad.reshape(n, groups, per, -1)
        parts = []
        for place in places:
            right = _met(x, place, sizes, stride, dilation).reshape(n, groups, entries, -1)
            parts.append((left @ right.transpose(-1, -2)).sum(0).reshape(-1, entries))
        return (parts[0] if len(parts) == 1 else torch.stack(parts, -1)).reshape(w.shape)
    # The sum over samples within the product: channels first, then all samples and places as one axis.
    x, left = x.transpose(0, 1), grad.transpose(0, 1).reshape(per, -1)
    met = [_met(x, place, sizes, stride, dilation) for place in places]
    if entries < _FEW or prod(sizes) <= _SMALL:  # one product for all places of the kernel, where each would be small
        return (left @ torch.stack(met, 1).reshape(entries * len(places), -1).t()).reshape(w.shape)
    return torch.stack([left @ m.reshape(entries, -1).t() for m in met], -1).reshape(w.shape)


def _met(x: Tensor, place: Sequence[int], sizes: list[int], stride: list[int], dilation: list[int]) -> Tensor:
    """The entries of x that this place of the kernel touched, for each output."""
    for axis, (i, count, s, d) in enumerate(zip(place, sizes, stride, dilation, strict=True)):
        start, end = i * d, i * d + (count - 1) * s + 1
        if start or s > 1 or x.shape[axis + 2] != count:
            x = aten.slice.Tensor(x, axis + 2, start, end, s)
    return x


TABLE: Decompositions = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
