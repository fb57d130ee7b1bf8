"""`int8`: blocks of 64 values, each in whole steps of its own scale; 8.25 bits a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.codecs.blocks import (
    SCALE,
    absmax_of,
    block_count,
    blocks_of,
    float_refusal,
    in_range,
    pieces,
    rounded,
    scales_of,
    steps_in,
    value_of,
)
from fxpipe.codecs.codec import OUTER, Codec, EdgeState
from fxpipe.plan.spec import TensorSpec

BLOCK = 64
STEPS = 127


@dataclass(frozen=True)
class Int8(Codec):
    """Whole steps from -127 to 127 in blocks of 64 values: decoded = s·q, s = max|x| / 127.

    Without a state q = round(x / s), and |error| ≤ s/2. With a state, as for gradients, q = ⌊x / s + u⌋ with u uniform
    in [0, 1): |error| < s with mean 0, so that errors do not add up over training steps.

    s is a bfloat16, rounded up by a factor of at most 1 + 2⁻⁷. In blocks of 64 an outlier affects only its neighbours.
    A block with a value that is not finite becomes NaN; a block whose values are all below 1e-34 becomes 0.

    Packed: uint8[66·blocks], first all scales, then all q.

    Source: blocks from Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861); stochastic
    rounding from Alistarh et al., QSGD (arXiv 1610.02132).
    """

    name: ClassVar[str] = "int8"

    def refusal(self, tensor: TensorSpec) -> str:
        return float_refusal(tensor)

    def keeps_state(self, kind: str) -> bool:
        return kind in ("gradient", OUTER)

    def packed(self, tensor: TensorSpec) -> TensorSpec:
        return TensorSpec((block_count(tensor.shape, BLOCK) * (2 + BLOCK),), (1,), "uint8")

    def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
        blocks = blocks_of(value, BLOCK)
        packed = value.new_empty(len(blocks) * (2 + BLOCK), dtype=torch.uint8)
        scales, codes = _parts(packed, len(blocks))
        random = None if state is None else state.random_int16(blocks)
        scales.copy_(scales_of(absmax_of(blocks), STEPS))
        steps_of_1 = steps_in(scales)
        for piece in pieces(blocks):
            steps = blocks[piece] * steps_of_1[piece]
            codes[piece] = rounded(steps, None if random is None else random[piece])
        return packed

    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = block_count(shape, BLOCK)
        scales, codes = _parts(packed, count)
        blocks = packed.new_empty((count, BLOCK), dtype=dtype)
        for piece in pieces(blocks):
            steps = codes[piece].to(torch.float32)
            values = steps.mul_(scales[piece].to(torch.float32).unsqueeze(1))
            blocks[piece] = in_range(values, dtype)
        return value_of(blocks, shape)


def _parts(packed: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Views: bfloat16[count] scales, and int8[count, 64] steps."""
    return packed[: 2 * count].view(SCALE), packed[2 * count :].view(torch.int8).view(count, BLOCK)
