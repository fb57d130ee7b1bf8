"""Blocks: neighbouring values that share one scale. What the codecs of small integers have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fxpipe.plan.spec import TensorSpec

FLOATS = ("float32", "float64", "bfloat16", "float16")
SCALE = torch.bfloat16
"""The range of float32, since the scales of small gradients vanish in float16, in two bytes."""
_SMALLEST = 2.0**-120
"""Scales below become 0: their inverses, and what rounding does to them, would leave float32's range."""
_PIECE = 2**18
"""Values that a CPU works on at once: what is in between then stays in cache, and in memory already in use."""


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
    """All of the blocks, in pieces: a few on a CPU, one elsewhere, where every piece would be a launch."""
    size = _PIECE // blocks.shape[1] if blocks.is_cpu else max(len(blocks), 1)
    return (slice(start, start + size) for start in range(0, len(blocks), size))


def value_of(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """The values of blocks that nothing else needs, in a shape, without those that filled the last block."""
    flat, count = blocks.view(-1), math.prod(shape)
    return (flat if count == flat.numel() else flat[:count].clone()).view(tuple(shape))


def in_range(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values of finite ones, or NaN, that may become such a dtype, in the same memory.

    What rounding has pushed beyond the greatest number of the dtype, or of float32, becomes that.
    """
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return values.clamp_(-most, most)


def scales_of(blocks: Tensor, steps: int) -> Tensor:
    """bfloat16[blocks]: the size of a step, of which `steps` reach the greatest |value| of a block.

    It is absmax / steps, rounded up, and so at most 1 + 2⁻⁷ times as large; 0 below 2⁻¹²⁰; NaN for a block with a value
    that is not finite, which makes NaN of the whole block.
    """
    absmax = blocks.abs().amax(1)
    exact = absmax / steps + (absmax - absmax)  # ∞ - ∞ is NaN
    nearest = exact.to(SCALE)
    up = (nearest.view(torch.int16) + (nearest.to(torch.float32) < exact)).view(
        SCALE
    )  # the next number has the next bits
    return torch.where(exact < _SMALLEST, 0.0, up)


def in_steps(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32, memory of its own: the values in steps, between -steps and steps without reaching further."""
    wide = scales.to(torch.float32)
    inverse = torch.where(wide == 0, 0.0, (1 - 2**-22) / wide)
    return blocks * inverse.unsqueeze(1)


def rounded(steps: Tensor, random: Tensor | None) -> Tensor:
    """Whole steps, in the same memory: the nearest, or with random int16 the next above or below, right on average.

    ⌊x + u⌋ for u in [0, 1) is round(x + u - 1/2): a random number has 16 bits, so the mean is off by 2⁻¹⁷ at most.
    """
    if random is not None:
        steps.add_(random.to(torch.float32), alpha=2**-16)
    return steps.round_()
