"""`topk`: only the greatest values, each with its index; the others are carried over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.codecs.carry_over import CarryOver, in_range_if_finite
from fxpipe.codecs.codec import EdgeState
from fxpipe.errors import CodecError
from fxpipe.plan.spec import TensorSpec


@dataclass(frozen=True)
class TopK(CarryOver):
    """The k = ⌈fraction·n⌉ values of the greatest magnitude, exact in float32; 0 for the others.

    Values that are not finite count as greatest, and are sent. With a fraction of 0.25 it takes half of float32's
    bytes, with the default of 0.01 a fiftieth.

    Packed: int32[2·k], the indices in ascending order, then the bits of the values.

    Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent (arXiv 1704.05021); Stich et al.,
    Sparsified SGD with Memory (arXiv 1809.07599), who show that it converges like SGD.

    Attributes:
        fraction: the share of values that is sent, in (0, 1].
    """

    name: ClassVar[str] = "topk"
    fraction: float = 0.01

    @classmethod
    def of(cls, option: str) -> TopK:
        try:
            fraction = float(option)
        except ValueError:
            fraction = math.nan
        if not 0 < fraction <= 1:
            raise CodecError(f"'topk:{option}' has no fraction", hint="give a fraction above 0, at most 1: topk:0.01")
        return cls(fraction)

    def refusal(self, tensor: TensorSpec) -> str:
        if math.prod(tensor.shape) >= 2**31:
            return "less than 2³¹ values"
        return super().refusal(tensor)

    def packed(self, tensor: TensorSpec) -> TensorSpec:
        return TensorSpec((2 * self._count(tensor.shape),), (1,), "int32")

    def compress(self, target: Tensor, state: EdgeState) -> tuple[Tensor, dict[str, Tensor]]:
        flat = target.reshape(-1)
        places = greatest(flat.abs(), self._count(target.shape)).sort().values
        return torch.cat([places.to(torch.int32), flat[places].view(torch.int32)]), {}

    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        places, values = packed.view(2, -1)
        flat = packed.new_zeros(math.prod(shape), dtype=dtype)
        flat[places.to(torch.int64)] = in_range_if_finite(values.view(torch.float32), dtype)
        return flat.view(tuple(shape))

    def _count(self, shape: Sequence[int]) -> int:
        return math.ceil(self.fraction * math.prod(shape))


def greatest(magnitudes: Tensor, count: int) -> Tensor:
    """The indices of the `count` greatest of a vector of numbers ≥ 0, in any order; NaN is greater than all others.

    Selecting from all values is slow on a CPU. So it splits them into 4·`count` groups: the `count`-th greatest of
    their maxima is at most the `count`-th greatest value, and few values reach it.
    """
    groups = 4 * count
    size = len(magnitudes) // max(groups, 1)
    if size < 8 or not magnitudes.is_cpu:
        return magnitudes.topk(count, sorted=False).indices
    maxima = magnitudes[: size * groups].view(size, groups).amax(0)
    least = maxima.nan_to_num_(nan=torch.inf, posinf=torch.inf).topk(count, sorted=False).values.min()
    candidates = (magnitudes < least).logical_not_().nonzero().squeeze(1)  # NaN is not less
    return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
