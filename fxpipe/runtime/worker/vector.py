"""Tensors of one dtype in one vector, which the replicas of a worker add up or gather."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

from fxpipe.plan.packing import Layout, contiguous_stride
from fxpipe.plan.spec import TensorSpec

Name = TypeVar("Name")


class Vector(Generic[Name]):
    """Tensors of one dtype in one vector: one after the other, without gaps, each with the strides of its `Layout`.

    Args:
        specs: of all tensors that such vectors may have, by name.
    """

    def __init__(self, specs: Mapping[Name, TensorSpec]) -> None:
        self._layouts = {name: Layout(spec) for name, spec in specs.items()}

    def size(self, names: Iterable[Name]) -> int:
        """How many elements a vector of these tensors has."""
        return sum(self._layouts[name].count for name in names)

    def views(self, flat: torch.Tensor, names: Iterable[Name] | None = None) -> dict[Name, torch.Tensor]:
        """The tensors of a vector, as views; `names` are those that it has, in its order, None all."""
        views, begin = {}, flat.storage_offset()
        for name in self._layouts if names is None else names:
            layout = self._layouts[name]
            views[name] = flat.as_strided(layout.shape, layout.stride, begin)
            begin += layout.count
        return views

    def joined(self, tensors: Mapping[Name, torch.Tensor], names: Sequence[Name] | None = None) -> torch.Tensor:
        """A new vector of tensors, on their device; `names` as for `views`."""
        names = list(self._layouts if names is None else names)
        first = next(iter(tensors.values()))
        flat = torch.empty(self.size(names), dtype=first.dtype, device=first.device)
        for name, view in self.views(flat, names).items():
            view.copy_(tensors[name].detach())
        return flat


def row_by_row(tensor: torch.Tensor) -> TensorSpec:
    """Of a tensor like this one with row-major strides."""
    return TensorSpec(tuple(tensor.shape), contiguous_stride(tensor.shape), str(tensor.dtype).removeprefix("torch."))
