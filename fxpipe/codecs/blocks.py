"""Blocks: neighbouring values that share one scale. Common code of the codecs of small integers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fxpipe.plan.spec import TensorSpec

FLOATS = ("float32", "float64", "bfloat16", "float16")
SCALE = torch.bfloat16
"""Two bytes with the range of float32: the scales of small gradients would vanish in float16."""
_SMALLEST = 2.0**-120
"""Smaller scales become 0: their inverses, and rounding, would leave float32's range."""
_PIECE = 2**17
"""Values that a CPU works on at once, so that intermediate results stay in cache and reuse memory."""


def float_refusal(tensor: TensorSpec) -> str:
    """Why a codec of floating-point numbers does not encode a tensor; '' if it does."""
    return "" if tensor.dtype in FLOATS else f"{', '.join(FLOATS)}, and this is {tensor.dtype}"


def block_count(shape: Sequence[int], size: int) -> int:
    """How many blocks of `size` values hold such a tensor."""
    return -(-math.prod(shape) // size)


def blocks_of(value: Tensor, size: int) -> Tensor:
    """float32[blocks, size] with the values row by row, and zeros to fill the last block; maybe the same memory."""
    flat = value.reshape(-1).to(torch.float32)
    missing = -flat.numel() % size
    return (F.pad(flat, (0, missing)) if missing else flat).view(-1, size)


def pieces(blocks: Tensor) -> Iterator[slice]:
    """All blocks, in pieces: several on a CPU; one on other devices, where every piece would be a launch."""
    size = _PIECE // blocks.shape[1] if blocks.is_cpu else max(len(blocks), 1)
    return (slice(start, start + size) for start in range(0, len(blocks), size))


def value_of(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """The values of blocks in a shape, without those that filled the last block; takes over the blocks' memory."""
    flat, count = blocks.view(-1), math.prod(shape)
    return (flat if count == flat.numel() else flat[:count].clone()).view(tuple(shape))


def in_range(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp float32 values, in the same memory, to the range of a dtype; NaN stays NaN.

    Values that rounding has pushed beyond the greatest number of the dtype, or of float32, become that number.
    """
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return values.clamp_(-most, most)


def absmax_of(blocks: Tensor) -> Tensor:
    """float32[blocks]: the greatest |value| of each block."""
    if not blocks.numel():
        return blocks.new_empty(len(blocks))
    return torch.cat([blocks[piece].abs().amax(1) for piece in pieces(blocks)])


def scales_of(absmax: Tensor, steps: int) -> Tensor:
    """bfloat16[blocks]: the size of a step; `steps` of them reach the greatest |value| of a block.

    It is absmax / steps, rounded up by a factor of at most 1 + 2⁻⁷; 0 below 2⁻¹²⁰; NaN for a block with a value that is
    not finite, so that the whole block becomes NaN.
    """
    exact = absmax / steps + (absmax - absmax)  # ∞ - ∞ is NaN
    nearest = exact.to(SCALE)
    too_small = nearest.to(torch.float32) < exact
    rounded_up = (nearest.view(torch.int16) + too_small).view(SCALE)  # the next number has the next bits
    return torch.where(exact < _SMALLEST, 0.0, rounded_up)


def steps_in(scales: Tensor) -> Tensor:
    """float32[blocks, 1]: how many steps make 1. Blocks times these are never outside [-steps, steps]."""
    wide = scales.to(torch.float32)
    return torch.where(wide == 0, 0.0, (1 - 2**-22) / wide).unsqueeze(1)


def rounded(steps: Tensor, random: Tensor | None) -> Tensor:
    """Round to whole steps, in the same memory: to nearest, or with random int16 stochastically, right on average.

    ⌊x + u⌋ for u in (0, 1) is round(x + u - 1/2). Here u has 16 bits plus half a bit, so whole numbers do not change,
    and the mean is off by at most 2⁻¹⁷.
    """
    if random is not None:
        steps.add_(random.to(torch.float32).add_(0.5), alpha=2**-16)
    return steps.round_()
