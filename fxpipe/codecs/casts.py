"""Casts: a value in half its bytes, as bfloat16 or float16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.codecs.codec import Codec, EdgeState
from fxpipe.plan.spec import TensorSpec

_WIDE = ("float32", "float64")
_HALF_MAX = 65504.0


class Cast(Codec):
    """Writes every number in a dtype of two bytes, `to`, rounded to nearest."""

    to: ClassVar[str]

    def refusal(self, tensor: TensorSpec) -> str:
        return "" if tensor.dtype in _WIDE else f"{' and '.join(_WIDE)}; {tensor.dtype} would not become smaller"

    def packed(self, tensor: TensorSpec) -> TensorSpec:
        return TensorSpec((math.prod(tensor.shape),), (1,), self.to)

    def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
        return value.reshape(-1).to(getattr(torch, self.to))

    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return packed.to(dtype, copy=True).reshape(tuple(shape))


@dataclass(frozen=True)
class Bf16(Cast):
    """bfloat16: float32's range, 8 bits of precision, |error| ≤ 2⁻⁸·|value|.

    Numbers beyond ±3.39e38 become ±3.39e38: if a mask's `finfo.min` became -∞, a completely masked row would become
    NaN. Infinite numbers stay infinite.
    """

    name: ClassVar[str] = "bf16"
    to: ClassVar[str] = "bfloat16"

    def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
        flat = value.reshape(-1)
        most = torch.finfo(torch.bfloat16).max
        return torch.where(flat.isinf(), flat, flat.clamp(-most, most)).to(torch.bfloat16)


@dataclass(frozen=True)
class Fp16(Cast):
    """float16: |error| ≤ 2⁻¹¹·|value| from 6.1e-5 to 65504, and below that at most 3e-8.

    Numbers beyond become ±65504, infinite ones NaN. Gradients below 3e-8 are lost; `bf16` keeps them.
    """

    name: ClassVar[str] = "fp16"
    to: ClassVar[str] = "float16"

    def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
        flat = value.reshape(-1)
        return (flat - flat).add_(flat.clamp(-_HALF_MAX, _HALF_MAX)).to(torch.float16)  # ∞ - ∞ is NaN
