"""The interface of a codec, which writes a value in fewer bytes for a link and reads it back; its sender's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.errors import CodecError
from fxpipe.plan.spec import TensorSpec
from fxpipe.random_state import seed_of

KINDS = ("input", "activation", "saved", "gradient", "weights")
"""The kinds of edges, and copies of weights."""

OUTER = "outer"
"""What replicas that train separately send in outer steps. Only a codec that is given for it packs it."""

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@dataclass
class EdgeState:
    """The state of one edge at its sender.

    Attributes:
        memory: tensors by name, kept between messages: what was not sent yet, or a basis to start from. A codec
            replaces them, and never changes them in place. They are part of checkpoints.
        place: the run's seed, and the edge, minibatch and microbatch of the message.
    """

    memory: dict[str, Tensor] = field(default_factory=dict)
    place: Callable[[], tuple[object, ...]] = tuple

    def uniform(self, like: Tensor) -> Tensor:
        """Random float32 numbers in [0, 1), as many as `like` has; the same for the same message of the same run.

        They do not come from torch's own generators, so a model draws the same numbers with and without codecs.
        """
        return torch.rand(like.shape, generator=self._generator(like.device), device=like.device)

    def random_int16(self, like: Tensor) -> Tensor:
        """Uniform random int16, as many as `like` has; on a CPU they cost a fourth of `uniform`.

        Each 64 random bits make four.
        """
        bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
        bits.random_(-(2**63), None, generator=self._generator(like.device))
        return bits.view(torch.int16)[: like.numel()].view(like.shape)

    def _generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed_of(*self.place()))


@dataclass(frozen=True)
class Codec(ABC):
    """Writes a value in fewer bytes, and reads it back. A subclass is a frozen dataclass; its fields are its options.

    `encode` and `decode` are torch operators without loops over elements, give the same bits in every process, and
    never change what they are given.

    Attributes:
        name: in `--codec` and the emitted code; a Python identifier.
        lossless: whether values have the same bits when read back.
        kinds: those of `KINDS`, and `OUTER`, for which it makes sense.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[str, ...]] = (*KINDS, OUTER)

    @classmethod
    def of(cls, option: str) -> Codec:
        """The codec with its option, which follows a colon in `--codec`.

        Raises:
            CodecError: it has no option, or this value is wrong.
        """
        raise CodecError(f"codec '{cls.name}' has no option", hint=f"use --codec {cls.name}")

    @property
    def text(self) -> str:
        """Its name with its option, from which `codec` makes it again: `topk:0.01`."""
        return ":".join([self.name, *(str(getattr(self, option.name)) for option in fields(self))])

    def refusal(self, tensor: TensorSpec) -> str:
        """Why it does not encode such a tensor, in words that follow "int8 is for "; '' if it does."""
        return ""

    def keeps_state(self, kind: str) -> bool:
        """Whether `encode` needs the sender's state for this kind of edge, for random numbers or memory."""
        return False

    @abstractmethod
    def packed(self, tensor: TensorSpec) -> TensorSpec:
        """The packed form of such a tensor: one dimension, contiguous, with the same size for all values."""

    @abstractmethod
    def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
        """Pack a contiguous value into the shape and dtype of `packed`, on the value's device.

        Infinite or NaN values must arrive as infinite or NaN, so that a run can stop.

        Args:
            state: the sender's state of this edge, if the codec keeps one; it may put new tensors into its `memory`.

        Raises:
            RunError: the codec is lossless, and this value does not fit.
        """

    @abstractmethod
    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Read a value back: contiguous, in new memory.

        Args:
            packed: what `encode` made; received ones are aligned to 64 bytes.
            shape, dtype: of the encoded value.
        """

    def pack(self, value: Tensor, state: EdgeState | None = None) -> Tensor:
        """`encode`, called before a value is sent; inside `without_codecs` returns the value.

        Raises:
            CodecError: what it returned does not fit `packed`.
        """
        if is_without_codecs():
            return value
        plain = value.detach().contiguous()
        due = self.packed(TensorSpec(tuple(plain.shape), plain.stride(), str(plain.dtype).removeprefix("torch.")))
        return self._checked("encode", self.encode(plain, state), due.shape, getattr(torch, due.dtype))

    def unpack(
        self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> Tensor:
        """`decode`, called after a value was received; inside `without_codecs` returns the value.

        Args:
            stride: of the value, if it is not row by row.

        Raises:
            CodecError: what it returned has another shape or dtype.
        """
        if is_without_codecs():
            return packed
        value = self._checked("decode", self.decode(packed, shape, dtype), shape, dtype)
        if stride is None or value.stride() == tuple(stride):
            return value
        return value.new_empty_strided(tuple(shape), tuple(stride)).copy_(value)

    def _checked(self, method: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if isinstance(tensor, Tensor) and tensor.shape == tuple(shape) and tensor.dtype == dtype:
            return tensor
        kind = f"{tensor.dtype}{list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
        raise CodecError(
            f"{method} of codec '{self.name}' returned {kind}, and must return {dtype}{list(shape)}",
            where=f"{type(self).__module__}.{type(self).__name__}",
            hint="encode must return what packed says" if method == "encode" else None,
        )


def is_without_codecs() -> bool:
    """Whether this is inside `without_codecs`."""
    return _PLAIN.get()


@contextmanager
def without_codecs() -> Iterator[None]:
    """Inside, emitted code sends and receives values without codecs, to check the rest of a stage."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)
