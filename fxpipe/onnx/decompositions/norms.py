"""Batch norms as torch decomposes them, with results of the right dtypes, and group norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxpipe.torch_private import Decompositions, OpOverload, torch_decompositions

aten, prims = torch.ops.aten, torch.ops.prims
Results = tuple[Tensor | None, ...]


def _wide(v: Tensor, x: Tensor) -> Tensor:
    """One value per channel, shaped to broadcast against [batch, channels, …]."""
    return v.reshape(-1, *[1] * (x.ndim - 2)) if x.ndim > 2 else v


def _kind(x: Tensor) -> torch.dtype:
    """The dtype to compute in: float32 for the half types, as in the kernels."""
    return torch.promote_types(x.dtype, torch.float32)


def _cast(v: Tensor | None, kind: torch.dtype) -> Tensor | None:
    return None if v is None else v.to(kind)


def _computed(
    operator: OpOverload, inputs: Sequence[Tensor | None], more: Sequence[object], kinds: Sequence[torch.dtype]
) -> Results:
    """torch's decomposition, computed in `_kind`; torch.onnx gives wrong statistics. Results have these dtypes."""
    wide = [None if x is None else x.to(_kind(x)) for x in inputs]
    results = torch_decompositions[operator](*wide, *more)
    return tuple(_cast(x, kind) for x, kind in zip(results, kinds, strict=True))


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *more: object
) -> Results:
    saved = (mean if weight is None else weight).dtype
    kinds = (x.dtype, saved, saved, mean.dtype, var.dtype)
    return _computed(aten._native_batch_norm_legit_functional.default, (x, weight, bias, mean, var), more, kinds)


def _without_running(x: Tensor, weight: Tensor | None, bias: Tensor | None, *more: object) -> Results:
    saved = (x if weight is None else weight).dtype
    kinds = (x.dtype, saved, saved)
    return _computed(aten._native_batch_norm_legit.no_stats, (x, weight, bias), more, kinds)


def _with_update(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *more: object
) -> Results:
    out, saved_mean, rstd, *running = _batch_norm(x, weight, bias, mean, var, True, *more)
    return out, saved_mean, rstd, x.new_zeros(0, dtype=torch.uint8), *running


# Group norms of torch's decompositions make graphs larger by a third, and slower by a tenth.


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, saved = x.dtype, x.dtype if weight is None else weight.dtype
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
    return out.to(dtype), mean.reshape(n, group).to(saved), rstd.reshape(n, group).to(saved)


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
    per, kind, dtype = c // group, _kind(x), x.dtype
    of_weight = dtype if weight is None else weight.dtype
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
    return _cast(dx, dtype), _cast(dw, of_weight), _cast(db, of_weight)


def _squeeze(x: Tensor, dimensions: Sequence[int]) -> Tensor:
    return x.reshape([size for axis, size in enumerate(x.shape) if axis not in dimensions])


def _broadcast(x: Tensor, shape: Sequence[int], dimensions: Sequence[int]) -> Tensor:
    sizes = dict(zip(dimensions, x.shape, strict=True))
    return x.reshape([sizes.get(axis, 1) for axis in range(len(shape))]).expand(shape)


TABLE: Decompositions = {
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _without_running,
    aten._batch_norm_with_update_functional.default: _with_update,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    # torch.onnx refuses views that are not aten's.
    prims.squeeze.default: _squeeze,
    prims.broadcast_in_dim.default: _broadcast,
}
