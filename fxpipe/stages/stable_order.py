"""Stable sorting: equal elements keep their order, as in ONNX; PyTorch does not promise it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.stages.part_call import Function
from fxpipe.torch_private import LightDispatchMode

aten = torch.ops.aten


def in_stable_order(function: Function) -> Function:
    """The function with a stable `sort` and `topk`; equal elements are, for example, tokens with the same expert."""

    def call(weights: Any, buffers: Any, third: Any, comm: Any) -> Any:
        with _StableOrder():
            return function(weights, buffers, third, comm)

    return call


class _StableOrder(LightDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.sort.default:
            return _sort(*args, **kwargs)
        if func is aten.topk.default:
            return _topk(*args, **kwargs)
        return func(*args, **kwargs)


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = aten.sort.stable(x, stable=True, dim=dim, descending=descending)
    return values, indices


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = _sort(x, dim, largest)
    return values.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous()
