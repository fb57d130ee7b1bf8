"""Values for codecs: what they are packed from, and to and fro in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpipe.codecs import Codec
from fxpipe.codecs.codec import EdgeState
from fxpipe.plan.spec import TensorSpec

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def spec_of(value: Tensor) -> TensorSpec:
    """As a plan has it."""
    return TensorSpec(tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))


def to_and_fro(codec: Codec, value: Tensor, state: EdgeState | None = None) -> Tensor:
    """What arrives, through memory of its own: nothing but the packed bytes gets across."""
    packed = codec.pack(value, state).clone()
    return codec.unpack(packed, value.shape, value.dtype)


def state_at(*place: object) -> EdgeState:
    """The state of a sender that remembers nothing yet, for a message at this place."""
    return EdgeState(place=lambda: place)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same in every test."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    """Student's t with 2 degrees of freedom: an outlier in most tiles."""
    generator = torch.Generator().manual_seed(seed)
    chi = torch.randn((2, *shape), generator=generator).square().sum(0)
    return torch.randn(shape, generator=generator) / (chi / 2).sqrt()
