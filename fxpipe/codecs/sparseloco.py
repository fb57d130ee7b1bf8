"""`sparseloco`: the greatest values of each chunk, in 14 bits each; a part of the others is carried over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.codecs.blocks import SCALE, block_count, blocks_of, value_of
from fxpipe.codecs.carry_over import CarryOver, in_range_if_finite
from fxpipe.codecs.codec import OUTER, EdgeState
from fxpipe.device_copies import widest
from fxpipe.errors import CodecError
from fxpipe.plan.spec import TensorSpec

CHUNK = 4096
"""Values that compete for a place in a message; an index has 12 bits."""


@dataclass(frozen=True)
class SparseLoCo(CarryOver):
    """The k values of the greatest magnitude of each chunk of 4096, with two magnitudes for each chunk; 0 for others.

    A chunk's values are above or below the mean of their k magnitudes; each becomes ± the mean of its half. Zeros stay
    0. 95% of what a message leaves out is added to the next one. This takes the place of momentum in outer steps.

    A tensor is cut evenly, so its chunks may be smaller, and a small one may be sent with all its values. If a chunk
    has a value that is not finite, all that is sent of it becomes NaN.

    Packed: uint8[chunks·(4 + 7·k/4)], first the lower and the higher magnitude of each chunk as bfloat16. Then four
    values in seven bytes: for each its index, 1 bit for the higher magnitude, 1 bit for the sign.

    Source: Sarfi et al., SparseLoCo (arXiv 2508.15706), with the constants of Lidin et al. (arXiv 2603.08163). The two
    magnitudes are our own.

    Attributes:
        count: k, a multiple of 4.
    """

    name: ClassVar[str] = "sparseloco"
    kinds: ClassVar[tuple[str, ...]] = (OUTER,)
    carried: ClassVar[float] = 0.95
    count: int = 64

    @classmethod
    def of(cls, option: str) -> SparseLoCo:
        if not (option.isascii() and option.isdigit() and 0 < int(option) <= CHUNK and int(option) % 4 == 0):
            raise CodecError(
                f"'sparseloco:{option}' has no number of values for each chunk of {CHUNK}",
                hint=f"give a multiple of 4, at most {CHUNK}: sparseloco:64",
            )
        return cls(int(option))

    def packed(self, tensor: TensorSpec) -> TensorSpec:
        chunks, _, count = self._sizes(tensor.shape)
        return TensorSpec((chunks * (4 + count // 4 * 7),), (1,), "uint8")

    def compress(self, target: Tensor, state: EdgeState) -> tuple[Tensor, dict[str, Tensor]]:
        chunks, size, count = self._sizes(target.shape)
        blocks = blocks_of(target, size)
        places = blocks.abs().topk(count).indices
        values = blocks.gather(1, places)
        magnitudes, sent = values.abs().to(widest(values.device)), values != 0  # their sum may leave float32's range
        high = magnitudes >= _mean(magnitudes, sent)
        means = torch.cat([_mean(magnitudes, sent & ~high), _mean(magnitudes, sent & high)], 1)
        numbers = places | high.to(torch.int64) << 12 | values.signbit().to(torch.int64) << 13
        numbers = torch.where(sent, numbers, numbers[:, :1])  # instead of a 0, the greatest value once more
        fours = (numbers.view(chunks, count // 4, 4) << _shifts(target)).sum(2, keepdim=True)
        sevens = fours.view(torch.uint8)[:, :, :7]
        return torch.cat([in_range_if_finite(means, SCALE).view(torch.uint8).view(-1), sevens.reshape(-1)]), {}

    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        chunks, size, count = self._sizes(shape)
        means = packed[: 4 * chunks].view(SCALE).view(chunks, 2).to(torch.float32)
        fours = packed.new_zeros((chunks, count // 4, 8))
        fours[:, :, :7] = packed[4 * chunks :].view(chunks, count // 4, 7)
        numbers = (fours.view(torch.int64) >> _shifts(packed)).view(chunks, count)
        magnitudes = means.gather(1, numbers >> 12 & 1)
        values = torch.where((numbers >> 13 & 1) == 1, -magnitudes, magnitudes)
        blocks = packed.new_zeros((chunks, size), dtype=dtype)
        return value_of(blocks.scatter_(1, numbers & CHUNK - 1, in_range_if_finite(values, dtype)), shape)

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """How many chunks there are, how many values each has, and how many of them are sent: multiples of 4."""
        chunks = block_count(shape, CHUNK)
        size = 4 * max(1, block_count(shape, 4 * max(1, chunks)))
        return chunks, size, min(self.count, size)


def _mean(magnitudes: Tensor, of: Tensor) -> Tensor:
    """float64[chunks, 1]: the mean of some of the magnitudes of each chunk; 0 of none."""
    return (magnitudes * of).sum(1, keepdim=True) / of.sum(1, keepdim=True).clamp(min=1)


def _shifts(like: Tensor) -> Tensor:
    """Where each of four values begins among the bits of an int64."""
    return torch.arange(0, 56, 14, device=like.device)
