"""Normalisations in training, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_private import Decompositions

aten = torch.ops.aten


def _wide(v: Tensor, x: Tensor) -> Tensor:
    """One value per channel, shaped to broadcast against [batch, channels, …]."""
    return v.reshape(-1, *[1] * (x.ndim - 2)) if x.ndim > 2 else v


def _kind(x: Tensor) -> torch.dtype:
    """The dtype to compute in: float32 for the half types, as in the kernels."""
    return torch.promote_types(x.dtype, torch.float32)


def _cast(v: Tensor | None, kind: torch.dtype) -> Tensor | None:
    return None if v is None else v.to(kind)


def _axes(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Output, mean and 1/deviation of the batch, and the new running statistics."""
    kind, made = _kind(x), x.dtype
    saved = next((v.dtype for v in (weight, running_mean) if v is not None), made)
    x, weight, bias = x.to(kind), _cast(weight, kind), _cast(bias, kind)
    if not training:
        assert running_mean is not None
        assert running_var is not None
        factor = torch.rsqrt(running_var.to(kind) + eps)
        if weight is not None:
            factor = factor * weight
        shift = -running_mean * factor if bias is None else bias - running_mean * factor
        nothing = x.new_zeros(0, dtype=saved)
        return (x * _wide(factor, x) + _wide(shift, x)).to(made), nothing, nothing, running_mean, running_var
    mean = x.mean(_axes(x))
    centred = x - _wide(mean, x)
    var = (centred * centred).mean(_axes(x))
    rstd = torch.rsqrt(var + eps)
    out = centred * _wide(rstd if weight is None else rstd * weight, x)
    if bias is not None:
        out = out + _wide(bias, x)
    if running_mean is not None:
        running_mean = (running_mean * (1 - momentum) + mean * momentum).to(running_mean.dtype)
    if running_var is not None:
        count = x.numel() // x.shape[1]
        share = momentum * count / max(count - 1, 1)
        running_var = (running_var * (1 - momentum) + var * share).to(running_var.dtype)
    return out.to(made), mean.to(saved), rstd.to(saved), running_mean, running_var


def _with_update_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor | None, ...]:
    out, mean, rstd, *running = _batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return out, mean, rstd, x.new_zeros(0, dtype=torch.uint8), *running


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not train:
        assert running_mean is not None
        assert running_var is not None
        mean, rstd = running_mean, torch.rsqrt(running_var.to(_kind(x)) + eps)
    assert mean is not None
    assert rstd is not None
    kind, made = _kind(x), x.dtype
    of_weight = made if weight is None else weight.dtype
    grad, x, weight = grad.to(kind), x.to(kind), _cast(weight, kind)
    mean, rstd = mean.to(kind), rstd.to(kind)
    factor = rstd if weight is None else rstd * weight
    total = grad.sum(_axes(x)) if train or output_mask[2] else None
    dx = dw = None
    if train or output_mask[1]:
        assert total is not None or not train
        centred = x - _wide(mean, x)
        dw = (grad * centred).sum(_axes(x)) * rstd
    if output_mask[0]:
        dx = grad * _wide(factor, x)
        if train:
            assert dw is not None
            assert total is not None
            count = x.numel() // x.shape[1]
            dx = dx - (centred * _wide(factor * rstd * dw / count, x) + _wide(factor * total / count, x))
    dw, db = dw if output_mask[1] else None, total if output_mask[2] else None
    return _cast(dx, made), _cast(dw, of_weight), _cast(db, of_weight)


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    shape, size, kind, made = x.shape, prod(normalized_shape), _kind(x), x.dtype
    of_weight = next((v.dtype for v in (weight, bias) if v is not None), made)
    grad, x, weight = grad.to(kind), x.to(kind), _cast(weight, kind)
    mean, rstd = mean.to(kind), rstd.to(kind)
    rows = x.numel() // size
    if len(normalized_shape) > 1 or x.ndim == 1:
        grad, x = grad.reshape(rows, size), x.reshape(rows, size)
        mean, rstd = mean.reshape(rows, 1), rstd.reshape(rows, 1)
        weight = None if weight is None else weight.reshape(size)
    hat = (x - mean) * rstd
    both = grad * hat
    outer = list(range(x.ndim - 1))
    dx = dw = db = None
    if output_mask[0]:
        # Sums over a row times the weight are products with a vector: they write nothing of the size of x.
        if weight is None:
            first, second = grad.mean(-1, keepdim=True), both.mean(-1, keepdim=True)
            dx = grad
        else:
            column = (weight / size).unsqueeze(-1)
            first, second = grad @ column, both @ column
            dx = grad * weight
        dx = ((dx - first - hat * second) * rstd).reshape(shape)
    if output_mask[1]:
        dw = both.sum(outer).reshape(normalized_shape)
    if output_mask[2]:
        db = grad.sum(outer).reshape(normalized_shape)
    return _cast(dx, made), _cast(dw, of_weight), _cast(db, of_weight)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    made, saved = x.dtype, x.dtype if weight is None else weight.dtype
    x = x.to(_kind(x))
    rows = x.reshape(n, group, -1)
    mean = rows.mean(-1, keepdim=True)
    centred = rows - mean
    rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    out = (centred * rstd).reshape(x.shape)
    if weight is not None:
        out = out * _wide(weight.to(x.dtype), x)
    if bias is not None:
        out = out + _wide(bias.to(x.dtype), x)
    return out.to(made), mean.reshape(n, group).to(saved), rstd.reshape(n, group).to(saved)


def _group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    per, kind, made = c // group, _kind(x), x.dtype
    of_weight = made if weight is None else weight.dtype
    grad, x, weight = grad.to(kind), x.to(kind), _cast(weight, kind)
    mean, rstd = mean.to(kind), rstd.to(kind)
    g = grad.reshape(n, group, per, hxw)
    hat = (x.reshape(n, group, -1) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    hat = hat.reshape(n, group, per, hxw)
    of_grad, of_both = g.sum(-1), (g * hat).sum(-1)  # [n, group, per]
    dx = dw = db = None
    if output_mask[0]:
        w = x.new_ones(1, group, per) if weight is None else weight.reshape(1, group, per)
        count = per * hxw
        first = ((of_grad * w).sum(-1) * (1 / count))[..., None, None]
        second = ((of_both * w).sum(-1) * (1 / count))[..., None, None]
        dx = ((g * w[..., None] - first - hat * second) * rstd[..., None, None]).reshape(x.shape)
    if output_mask[1]:
        dw = of_both.sum(0).reshape(c)
    if output_mask[2]:
        db = of_grad.sum(0).reshape(c)
    return _cast(dx, made), _cast(dw, of_weight), _cast(db, of_weight)


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    axes = sorted(d % x.ndim for d in dim) if dim else list(range(x.ndim))
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    count = prod(x.shape[a] for a in axes)
    free = count - (1 if correction is None else correction)
    var = (centred * centred).sum(axes, keepdim=keepdim) / free
    return var, mean if keepdim else mean.reshape(var.shape)


def _var(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Tensor:
    return _var_mean(x, dim, **options)[0]


TABLE: Decompositions = {
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, *more: _batch_norm(
        x, weight, bias, None, None, *more
    )[:3],
    aten._batch_norm_with_update_functional.default: _with_update_functional,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    # The last argument of these two is a buffer of the kernel's own.
    aten.cudnn_batch_norm_backward.default: lambda x, grad, weight, running_mean, running_var, mean, rstd, eps, _: (
        _batch_norm_backward(grad, x, weight, running_mean, running_var, mean, rstd, True, eps, [True, True, True])
    ),
    aten.batch_norm_backward.default: lambda *args: _batch_norm_backward(*args[:-1]),
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.std.correction: lambda x, dim=None, **options: _var(x, dim, **options).sqrt(),
}
