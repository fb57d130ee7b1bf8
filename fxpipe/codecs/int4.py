"""`int4`: tiles of 32 values in whole steps of their own scale, outliers spread by a rotation; 4.5 bits a value."""

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

TILE = 32
STEPS = 7


@dataclass(frozen=True)
class Int4(Codec):
    """Whole steps from -7 to 7 in tiles of 32 values x, some of them rotated: decoded = s·q, or s·q·H.

    H is the orthonormal Hadamard matrix, 32 × 32 entries of ±1/√32. It spreads an outlier over its tile, so that the
    steps for the other values need not be as large as the outlier requires. Both forms, y = x and y = x·H, are computed
    for each tile, each with s = max|y| / 7, and the one with the smaller squared error is sent. A negative s marks a
    rotated tile. A rotation keeps lengths, so the error of y is as long as the error of x.

    Without a state q = round(y / s): the error of a tile has at most the length s/2·√32. With a state, as for
    gradients, q = ⌊y / s + u⌋ with u uniform in [0, 1): at most twice that, and 0 on average.

    s is a bfloat16, rounded up by a factor of at most 1 + 2⁻⁷. A tile with a value that is not finite becomes NaN; a
    tile whose values are all below 5e-36 becomes 0.

    Packed: uint8[18·tiles], first all scales, then the tiles, 16 bytes each: q + 8 of value i in the lower half of byte
    i, that of value i + 16 in the upper.

    Source: based on TAH-Quant (arXiv 2506.01352: tiles, rotation against outliers, more bits for gradients), but it
    decides by the error instead of thresholds, and does not choose the number of bits by entropy.
    """

    name: ClassVar[str] = "int4"

    def refusal(self, tensor: TensorSpec) -> str:
        return float_refusal(tensor)

    def keeps_state(self, kind: str) -> bool:
        return kind in ("gradient", OUTER)

    def packed(self, tensor: TensorSpec) -> TensorSpec:
        return TensorSpec((block_count(tensor.shape, TILE) * (2 + TILE // 2),), (1,), "uint8")

    def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
        tiles = blocks_of(value, TILE)
        packed = value.new_empty(len(tiles) * (2 + TILE // 2), dtype=torch.uint8)
        scales, pairs = _parts(packed, len(tiles))
        random = None if state is None else state.random_int16(tiles)
        hadamard = hadamard_of(TILE, value.device)
        for piece in pieces(tiles):
            scales[piece], steps = _better_form(tiles[piece], hadamard, on_average=state is not None)
            codes = rounded(steps, None if random is None else random[piece]).add_(8).to(torch.uint8)
            pairs[piece] = codes[:, : TILE // 2] | (codes[:, TILE // 2 :] << 4)
        return packed

    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = block_count(shape, TILE)
        scales, pairs = _parts(packed, count)
        tiles = packed.new_empty((count, TILE), dtype=dtype)
        hadamard = hadamard_of(TILE, packed.device)
        for piece in pieces(tiles):
            scale, codes = scales[piece].to(torch.float32).unsqueeze(1), pairs[piece]
            form = torch.cat([codes & 15, codes >> 4], 1).to(torch.float32).sub_(8).mul_(scale.abs())
            tiles[piece] = in_range(torch.where(scale.signbit(), form @ hadamard, form), dtype)
        return value_of(tiles, shape)


def hadamard_of(size: int, device: torch.device) -> Tensor:
    """float32[size, size], orthonormal, symmetric; of a power of two. < 0 where i AND j has an odd count of bits."""
    index = torch.arange(size, device=device)
    common = index.unsqueeze(1) & index
    parity = torch.zeros_like(common)
    for bit in range(size.bit_length()):
        parity ^= common >> bit
    return (1 - 2 * (parity & 1)).to(torch.float32) * size**-0.5


def _better_form(tiles: Tensor, hadamard: Tensor, on_average: bool) -> tuple[Tensor, Tensor]:
    """bfloat16 scales, negative for rotated tiles, and float32 steps: for each tile, of the form with less error."""
    forms = tiles, tiles @ hadamard
    scales = [scales_of(absmax_of(form), STEPS) for form in forms]
    steps = [form * steps_in(scale) for form, scale in zip(forms, scales, strict=True)]
    plain, other = (_squared_error(s, on_average) for s in steps)
    ratio = scales[1].to(torch.float32) / scales[0].to(torch.float32)  # their squares could leave float32's range
    turned = other * ratio**2 < plain
    return torch.where(turned, -scales[1], scales[0]), torch.where(turned.unsqueeze(1), steps[1], steps[0])


def _squared_error(steps: Tensor, on_average: bool) -> Tensor:
    """The squared error of each tile in steps²: of rounding to nearest, or the mean of stochastic rounding."""
    remainder = steps - (steps.floor() if on_average else steps.round())
    return (remainder * (1 - remainder) if on_average else remainder * remainder).sum(1)


def _parts(packed: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Views: bfloat16[count] scales, and uint8[count, 16] pairs of steps."""
    return packed[: 2 * count].view(SCALE), packed[2 * count :].view(count, TILE // 2)
