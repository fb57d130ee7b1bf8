"""Pooling: backward of maxima by their indices, means as matrices along the axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from fxpipe.onnx.decompositions.linear_maps import along, constant, repeat
from fxpipe.torch_private import Decompositions

aten = torch.ops.aten


def _each(values: Sequence[int] | int, count: int) -> list[int]:
    values = [values] if isinstance(values, int) else list(values)
    return values * count if len(values) == 1 else values


# ---- maxima ----


def _max_backward(grad: Tensor, x: Tensor, indices: Tensor, axes: int) -> Tensor:
    """Indices are places in the flattened plane of x."""
    planes = x.shape[:-axes]
    flat = x.new_zeros((*planes, prod(x.shape[-axes:])))
    flat = flat.scatter_add(-1, indices.reshape(*planes, -1), grad.reshape(*planes, -1))
    return flat.reshape(x.shape)


def _max_pool_backward(
    axes: int,
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    kernel, pad = _each(kernel_size, axes), _each(padding, axes)
    step = _each(stride, axes) if stride else kernel
    spread = [s // k for s, k in zip(x.shape[-axes:], kernel, strict=True)]
    close = all(d == 1 for d in _each(dilation, axes))
    if kernel == step and close and not any(pad) and spread == list(grad.shape[-axes:]):
        return _disjoint(grad, x, kernel, indices, axes)
    return _max_backward(grad, x, indices, axes)


def _disjoint(grad: Tensor, x: Tensor, kernel: list[int], indices: Tensor, axes: int) -> Tensor:
    """For windows that do not overlap: is each entry the maximum of its window? Much faster than scatter."""
    sizes = list(x.shape[-axes:])
    covered = [g * k for g, k in zip(grad.shape[-axes:], kernel, strict=True)]
    # float32 holds each place of a plane up to 2²⁴ entries, at half the width.
    kind = torch.float32 if prod(sizes) < 2**24 else torch.int64
    places = torch.arange(prod(sizes), device=x.device, dtype=kind).reshape(sizes)
    for axis, end in enumerate(covered):
        places = places.narrow(axis, 0, end)
    split = [n for size, k in zip(grad.shape[-axes:], kernel, strict=True) for n in (size, k)]
    single = [n for size in grad.shape[-axes:] for n in (size, 1)]
    lead = list(x.shape[:-axes])
    chosen = places.reshape(split) == indices.to(kind).reshape(lead + single)
    spread = torch.where(chosen, grad.reshape(lead + single), 0.0).reshape(lead + covered)
    missing = [n for size, end in zip(reversed(sizes), reversed(covered), strict=True) for n in (0, size - end)]
    return torch.constant_pad_nd(spread, missing) if any(missing) else spread


def _adaptive_max(axes: int, x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    sizes, out_sizes = list(x.shape[-axes:]), _each(output_size, axes)
    if all(s % w == 0 for s, w in zip(sizes, out_sizes, strict=True)):
        kernel = [s // w for s, w in zip(sizes, out_sizes, strict=True)]
        pool = aten.max_pool2d_with_indices.default if axes == 2 else aten.max_pool3d_with_indices.default
        return pool(x, kernel, kernel)
    places = constant(lambda: _windows(sizes, out_sizes))
    flat = x.flatten(-axes)
    entries = flat.index_select(-1, places.reshape(-1)).reshape(*x.shape[:-axes], *places.shape)
    best = entries.argmax(-1, keepdim=True)
    indices = places.expand(entries.shape).gather(-1, best).squeeze(-1)
    return entries.amax(-1), indices


def _windows(sizes: Sequence[int], out_sizes: Sequence[int]) -> Tensor:
    """Places of each window's entries, [*wanted, most]; smaller windows repeat their first one."""
    windows: list[list[int]] = [[0]]
    for size, count in zip(sizes, out_sizes, strict=True):
        spans = [range(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        windows = [[p * size + s for p in window for s in span] for window in windows for span in spans]
    most = max(map(len, windows))
    return torch.tensor([w + w[:1] * (most - len(w)) for w in windows]).reshape(*out_sizes, most)


# ---- means ----


def _adaptive_matrix(size: int, count: int, dtype: torch.dtype) -> Tensor:
    m = torch.zeros(count, size, dtype=torch.float64)
    for i in range(count):
        start, end = i * size // count, -(-(i + 1) * size // count)
        m[i, start:end] = 1 / (end - start)
    return m.to(dtype)


def _adaptive_mean(axes: int, x: Tensor, output_size: Sequence[int]) -> Tensor:
    out_sizes = _each(output_size, axes)
    if out_sizes == [1] * axes:
        return x.mean(list(range(-axes, 0)), keepdim=True)
    sizes = list(x.shape[-axes:])
    matrices = [constant(partial(_adaptive_matrix, s, w, x.dtype)) for s, w in zip(sizes, out_sizes, strict=True)]
    return along(x, matrices)


def _adaptive_mean_backward(axes: int, grad: Tensor, x: Tensor) -> Tensor:
    sizes, out_sizes = list(x.shape[-axes:]), list(grad.shape[-axes:])
    if all(s % m == 0 for s, m in zip(sizes, out_sizes, strict=True)):
        factors = [s // m for s, m in zip(sizes, out_sizes, strict=True)]
        return repeat(grad * (1 / prod(factors)), factors)
    matrices = [constant(partial(_adaptive_matrix, s, m, x.dtype)).t() for s, m in zip(sizes, out_sizes, strict=True)]
    return along(grad, matrices)


def _mean_matrix(size: int, outputs: int, kernel: int, step: int, pad: int, include: bool) -> tuple[Tensor, Tensor]:
    """Which entries an output of one axis reads [made, size], and how many it counts."""
    m = torch.zeros(outputs, size, dtype=torch.float64)
    counts = torch.zeros(outputs, dtype=torch.float64)
    for i in range(outputs):
        start = i * step - pad
        end = min(start + kernel, size + pad)
        counts[i] = end - start if include else min(end, size) - max(start, 0)
        m[i, max(start, 0) : min(end, size)] = 1
    return m, counts


def _mean_backward(
    axes: int,
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    kernel, pad = _each(kernel_size, axes), _each(padding, axes)
    step = _each(stride, axes) if stride else kernel
    sizes, out_sizes = list(x.shape[-axes:]), list(grad.shape[-axes:])
    if kernel == step and not any(pad) and all(m * k == s for m, k, s in zip(out_sizes, kernel, sizes, strict=True)):
        return repeat(grad * (1 / (divisor_override or prod(kernel))), kernel)

    values = []
    for size, count, k, s, p in zip(sizes, out_sizes, kernel, step, pad, strict=True):
        m, counts = constant(partial(_mean_matrix, size, count, k, s, p, count_include_pad))
        values.append((m.t() if divisor_override else m.t() / counts).to(grad.dtype))
    return along(grad * (1 / divisor_override) if divisor_override else grad, values)


def _mean(
    axes: int,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    if not divisor_override:
        return NotImplemented  # torch.onnx converts it, but ignores the divisor
    kernel, pad = _each(kernel_size, axes), _each(padding, axes)
    step = _each(stride, axes) if stride else kernel
    out_sizes = [
        pooling_output(size, k, p, s, ceil_mode)
        for size, k, p, s in zip(x.shape[-axes:], kernel, pad, step, strict=True)
    ]
    values = [
        constant(partial(_mean_matrix, size, m, k, s, p, True))[0].to(x.dtype)
        for size, m, k, s, p in zip(x.shape[-axes:], out_sizes, kernel, step, pad, strict=True)
    ]
    return along(x, values) * (1 / divisor_override)


def pooling_output(size: int, kernel: int, pad: int, step: int, ceil: bool) -> int:
    """How many windows an axis has; with `ceil`, the last may overhang, but must start within the padded axis."""
    free = size + 2 * pad - kernel
    if not ceil:
        return free // step + 1
    count = -(-free // step) + 1
    return count - 1 if (count - 1) * step >= size + pad else count


TABLE: Decompositions = {
    aten.max_pool2d_with_indices_backward.default: partial(_max_pool_backward, 2),
    aten.max_pool3d_with_indices_backward.default: partial(_max_pool_backward, 3),
    aten.adaptive_max_pool2d.default: partial(_adaptive_max, 2),
    aten.adaptive_max_pool3d.default: partial(_adaptive_max, 3),
    aten.adaptive_max_pool2d_backward.default: lambda g, x, i: _max_backward(g, x, i, 2),
    aten.adaptive_max_pool3d_backward.default: lambda g, x, i: _max_backward(g, x, i, 3),
    aten._adaptive_avg_pool2d.default: partial(_adaptive_mean, 2),
    aten._adaptive_avg_pool3d.default: partial(_adaptive_mean, 3),
    aten._adaptive_avg_pool2d_backward.default: partial(_adaptive_mean_backward, 2),
    aten._adaptive_avg_pool3d_backward.default: partial(_adaptive_mean_backward, 3),
    aten.avg_pool2d.default: partial(_mean, 2),
    aten.avg_pool3d.default: partial(_mean, 3),
    aten.avg_pool2d_backward.default: partial(_mean_backward, 2),
    aten.avg_pool3d_backward.default: partial(_mean_backward, 3),
}
