"""Parameters one after the other in one vector: what replicas add up and hand out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false


class VectorPart:
    """How a parameter, or its gradient, is stored in a vector; made once, since looking at a layout takes microseconds.

    Attributes:
        size: elements.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.size = parameter.numel()
        self._parameter = parameter
        self._as_it_is = is_non_overlapping_and_dense_or_false(parameter)
        self._shape = parameter.shape
        self._stride = parameter.stride() if self._as_it_is else torch.empty(self._shape, device="meta").stride()

    def of(self, vector: Tensor, begin: int) -> Tensor:
        """The very memory that begins at an element of the vector, in the parameter's shape; to write there."""
        return vector.as_strided(self._shape, self._stride, vector.storage_offset() + begin)

    def laid_out(self, vector: Tensor, begin: int) -> Tensor:
        """What begins there, laid out as the parameter is: the very memory if it can be."""
        found = self.of(vector, begin)
        return found if self._as_it_is else torch.empty_like(self._parameter, requires_grad=False).copy_(found)


def in_one(values: Sequence[Tensor], parts: Sequence[VectorPart], kind: Tensor) -> Tensor:
    """Values of these parts in one vector, of the type and device of another tensor."""
    vector, begin = kind.new_empty(sum(part.size for part in parts)), 0
    for value, part in zip(values, parts, strict=True):
        part.of(vector, begin).copy_(value)
        begin += part.size
    return vector
