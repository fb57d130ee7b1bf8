"""`lowrank`: two thin factors instead of a matrix (PowerSGD); the rest is carried over."""

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
class LowRank(CarryOver):
    """M[n, m] ≈ P·Qᵀ of rank r, by one step of power iteration from the last message's Q.

    P = orthonormal(M·Q), Q ← Mᵀ·P, decoded = P·Qᵀ: the part of M in the span of P. n is the product of all dimensions
    but the last, m is the last. A matrix of rank at most r is exact except for rounding, even in the first message,
    which starts from random columns. For greater ranks each message is nearer to the best approximation.

    A matrix with a value that is not finite becomes NaN.

    Packed: float32[r·(n + m)], P row by row, then Q.

    Source: Vogels et al., PowerSGD (arXiv 1905.13727), with Householder's QR instead of Gram-Schmidt: it gives
    orthonormal columns for any matrix, even for zeros, with which Q would otherwise stay 0.

    Attributes:
        rank: r, at most that of a full matrix of the tensor's shape.
    """

    name: ClassVar[str] = "lowrank"
    rank: int = 4

    @classmethod
    def of(cls, option: str) -> LowRank:
        if not (option.isascii() and option.isdigit() and int(option) > 0):
            raise CodecError(f"'lowrank:{option}' has no rank", hint="give a whole number from 1: lowrank:4")
        return cls(int(option))

    def refusal(self, tensor: TensorSpec) -> str:
        if len(tensor.shape) < 2:
            return f"tensors with two dimensions or more, and this has {len(tensor.shape)}"
        return super().refusal(tensor)

    def packed(self, tensor: TensorSpec) -> TensorSpec:
        rows, columns, rank = self._sizes(tensor.shape)
        return TensorSpec((rank * (rows + columns),), (1,), "float32")

    def compress(self, target: Tensor, state: EdgeState) -> tuple[Tensor, dict[str, Tensor]]:
        rows, columns, rank = self._sizes(target.shape)
        matrix = target.view(rows, columns)
        start = state.memory.get("basis")
        if start is None:
            start = state.uniform(matrix.new_empty((columns, rank))) - 0.5
        left = torch.linalg.qr(matrix @ start).Q.contiguous()
        right = (left.T @ matrix).T  # as fast as M·Q, and Mᵀ·P is not
        return torch.cat([left.view(-1), right.reshape(-1)]), {"basis": torch.linalg.qr(right).Q.contiguous()}

    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        rows, columns, rank = self._sizes(shape)
        left, right = packed[: rows * rank].view(rows, rank), packed[rows * rank :].view(columns, rank)
        return in_range_if_finite(left @ right.T, dtype).view(tuple(shape))

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return rows, columns, min(self.rank, rows, columns)
