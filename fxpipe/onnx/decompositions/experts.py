"""Mixtures of experts: sorting, searching, and products of groups of rows, each group with its own matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_private import Decompositions

aten = torch.ops.aten


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Group g is the places from `offs[g-1]` to `offs[g]` of the axis that only one of the two has whole:

    a [rows, k] · b [g, k, n] → [rows, n];  a [g, m, k] · b [k, columns] → [m, columns];
    a [m, k] · b [k, n], where k has the groups → [g, m, n].

    Every row is multiplied with every group's matrix: how many rows a group has is known only when the model runs.
    A row after the last group is 0.
    """
    if bias is not None:
        raise NotImplementedError("a grouped product with a bias")
    kind = out_dtype or a.dtype
    a, b = a.float(), b.float()  # onnxruntime's CPU multiplies no 16 bits
    if offs is None:
        return (a @ b).to(kind)
    if a.ndim == 3:
        return _grouped_mm(b.mT, a.mT, offs).mT.to(kind)
    ends = offs.long().unsqueeze(1)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    places = torch.arange(a.shape[0] if b.ndim == 3 else a.shape[1], device=a.device)
    members = (places >= starts) & (places < ends)  # [groups, places]
    if b.ndim == 3:
        return torch.where(members.unsqueeze(-1), a @ b, 0.0).sum(0).to(kind)
    return (torch.where(members.unsqueeze(1), a, 0.0) @ b).to(kind)


def _grouped_mm_backward(x: Tensor, weight: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _grouped_mm(grad, weight.mT, offs), _grouped_mm(x.mT, grad, offs)


def _sort(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """ONNX's TopK is stable."""
    values, indices = aten.sort.default(x.int() if x.dtype is torch.bool else x, dim, descending)
    return values.to(x.dtype), indices


def _kth(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = (t.narrow(dim, k - 1, 1) for t in aten.sort.default(x, dim))
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _kth(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def _searchsorted(
    sequence: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    if sorter is not None:
        sequence = sequence.gather(-1, sorter)
    many = values.unsqueeze(-1)
    # A single sequence serves all values; of several, each serves its own row of values.
    sequence = sequence if sequence.ndim == 1 else sequence.unsqueeze(-2)
    before = sequence <= many if right or side == "right" else sequence < many
    return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


TABLE: Decompositions = {
    aten._grouped_mm.default: _grouped_mm,
    aten.kthvalue.default: _kth,
    aten.median.default: lambda x: _median(x.flatten(), 0)[0],
    aten.median.dim: _median,
    aten.searchsorted.Tensor: _searchsorted,
    aten.sort.stable: _sort,
}

_OF_LIBRARIES: dict[str, dict[str, Callable[..., Any]]] = {
    "transformers": {
        "grouped_mm_fallback": _grouped_mm,
        "grouped_mm_fallback_backward": _grouped_mm_backward,
    }
}


def of_libraries() -> Decompositions:
    """Decompositions of operators that exist only while their library is imported."""
    table: Decompositions = {}
    for library, functions in _OF_LIBRARIES.items():
        for name, function in functions.items():
            operator = getattr(getattr(torch.ops, library), name, None)
            if operator is not None:
                table[operator.default] = function
    return table
