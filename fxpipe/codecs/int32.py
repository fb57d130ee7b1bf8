"""`int32`: whole numbers of 64 bits in half their bytes, if they fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.codecs.codec import Codec
from fxpipe.codecs.edge_state import EdgeState
from fxpipe.errors import RunError
from fxpipe.plan.spec import TensorSpec


@dataclass(frozen=True)
class Int32(Codec):
    """int64 as int32: indices and classes fit. A value that does not is an error, and never another value."""

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
                hint="compile with none for their kind of edge, as in --codec activation=int8,input=none",
            )
        return packed

    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return packed.to(dtype, copy=True).view(tuple(shape))
