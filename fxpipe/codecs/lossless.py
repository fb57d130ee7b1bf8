"""Lossless codecs: `bits` writes eight truth values in a byte; `int32` writes int64 in half the bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fxpipe.codecs.codec import Codec, EdgeState
from fxpipe.errors import RunError
from fxpipe.plan.spec import TensorSpec

_SPREAD = ((7, 0x0101010101010101), (14, 0x0003000300030003), (28, 0x0000000F0000000F))
"""Shifts that move neighbouring groups of bits together, and masks of the bits before each."""


@dataclass(frozen=True)
class Bits(Codec):
    """Value i is bit i mod 8 of byte ⌊i / 8⌋, on machines whose lowest byte comes first.

    Eight truth values are one word of 64 bits, 0 or 1 in each of its bytes; three shifts bring them next to each other.
    """

    name: ClassVar[str] = "bits"
    lossless: ClassVar[bool] = True

    def refusal(self, tensor: TensorSpec) -> str:
        return "" if tensor.dtype == "bool" else f"truth values, and this is {tensor.dtype}"

    def packed(self, tensor: TensorSpec) -> TensorSpec:
        return TensorSpec((-(-math.prod(tensor.shape) // 8),), (1,), "uint8")

    def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
        flat = value.reshape(-1)
        words = F.pad(flat.view(torch.uint8), (0, -flat.numel() % 8)).view(torch.int64)
        for shift, _ in _SPREAD:
            words = words | (words >> shift)
        return words.to(torch.uint8)  # the lowest byte

    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        words = packed.to(torch.int64)
        for shift, mask in reversed(_SPREAD):
            words = (words | (words << shift)) & mask
        return words.view(torch.uint8)[: math.prod(shape)].view(tuple(shape)).to(dtype)


@dataclass(frozen=True)
class Int32(Codec):
    """int64 as int32: indices and classes fit. A value that does not fit is an error."""

    name: ClassVar[str] = "int32"
    lossless: ClassVar[bool] = True

    def refusal(self, tensor: TensorSpec) -> str:
        return "" if tensor.dtype == "int64" else f"int64, and this is {tensor.dtype}"

    def packed(self, tensor: TensorSpec) -> TensorSpec:
        return TensorSpec((math.prod(tensor.shape),), (1,), "int32")

    def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
        flat = value.reshape(-1)
        packed = flat.to(torch.int32)
        if not torch.equal(packed.to(torch.int64), flat):
            low, high = flat.aminmax()
            raise RunError(
                f"whole numbers from {int(low)} to {int(high)} are sent as int32, and do not fit",
                hint="compile with codec none for their kind of edge, as in --codec activation=int8,input=none",
            )
        return packed

    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return packed.to(dtype, copy=True).view(tuple(shape))
