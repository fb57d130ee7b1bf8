"""What a codec is: how a value is written in fewer bytes to cross a link, and read back; what its sender keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.errors import CodecError
from fxpipe.plan.spec import TensorSpec
from fxpipe.random_state import seed_of

KINDS = ("input", "activation", "saved", "gradient", "weights")
"""What a codec can be asked for: the kinds of edges that carry something, and copies of weights."""

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@dataclass
class EdgeState:
    """The state of one edge at its sender.

    Attributes:
        memory: tensors by name, from one message to the next: what was not sent yet, or a basis to begin with. A codec
            replaces them, and never changes them in place. They are part of checkpoints.
        place: gives the run's seed, and the edge, minibatch and microbatch of the message.
    """

    memory: dict[str, Tensor] = field(default_factory=dict)
    place: Callable[[], tuple[object, ...]] = tuple

    def uniform(self, like: Tensor) -> Tensor:
        """Random numbers in [0, 1), float32, as many as `like` has; the same for the same message of the same run.

        They do not come from torch's own generators: what a model draws is the same with codecs and without.
        """
        return torch.rand(like.shape, generator=self._generator(like.device), device=like.device)

    def random_int16(self, like: Tensor) -> Tensor:
        """Random int16, uniform over all of them, as many as `like` has: for a fourth of what `uniform` costs on a CPU.

        Each 64 random bits make four.
        """
        bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
        bits.random_(-(2**63), None, generator=self._generator(like.device))
        return bits.view(torch.int16)[: like.numel()].view(like.shape)

    def _generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed_of(*self.place()))


class Codec(ABC):
    """Writes a value in fewer bytes, and reads it back. A subclass is a frozen dataclass; its fields are its options.

    `encode` and `decode` are torch operators without loops over elements, give the same bits in every process, and
    never change what they are given.

    Attributes:
        name: as `--codec` and the emitted code have it, a Python identifier.
        lossless: whether what is read back is what was written, to the bit.
        kinds: which of `KINDS` it makes sense for.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[str, ...]] = KINDS

    @classmethod
    def of(cls, option: str) -> Codec:
        """The codec with its one option as `--codec` has it after a colon.

        Raises:
            CodecError: it has none, or not this one.
        """
        raise CodecError(f"codec '{cls.name}' has no option", hint=f"--codec {cls.name}")

    @property
    def text(self) -> str:
        """Its name with its option, from which `codec` makes it again: `topk:0.01`."""
        return self.name

    def refusal(self, tensor: TensorSpec) -> str:
        """Why it does not encode such a tensor, in words that go on from "int8 is for "; '' if it does."""
        return ""

    def keeps_state(self, kind: str) -> bool:
        """Whether `encode` takes the sender's state of an edge of this kind: it draws random numbers, or remembers."""
        return False

    @abstractmethod
    def packed(self, tensor: TensorSpec) -> TensorSpec:
        """What such a tensor is packed into: one dimension, contiguous; exact, and the same for all values."""

    @abstractmethod
    def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
        """Pack a contiguous value: into the shape and dtype that `packed` says, on the value's device.

        What is infinite or no number in it must arrive as infinite or no number, so that a run can stop.

        Args:
            state: the sender's, of this edge, where the codec keeps one; it may put new tensors into its `memory`.

        Raises:
            RunError: the codec is lossless, and this value does not fit.
        """

    @abstractmethod
    def decode(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Read a value back: contiguous, in memory of its own.

        Args:
            packed: what `encode` made. As it arrives it starts aligned, at 64 bytes.
            shape, dtype: those of the value that was encoded.
        """

    def pack(self, value: Tensor, state: EdgeState | None = None) -> Tensor:
        """What emitted code calls before it sends: `encode`, or nothing inside `without_codecs`."""
        return value if is_without_codecs() else self.encode(value.detach().contiguous(), state)

    def unpack(
        self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> Tensor:
        """What emitted code calls after it has received: `decode`, or nothing inside `without_codecs`.

        Args:
            stride: of the value, where it is not row by row.
        """
        if is_without_codecs():
            return packed
        value = self.decode(packed, shape, dtype)
        if stride is None or value.stride() == tuple(stride):
            return value
        return value.new_empty_strided(tuple(shape), tuple(stride)).copy_(value)


def is_without_codecs() -> bool:
    """Whether this is inside `without_codecs`."""
    return _PLAIN.get()


@contextmanager
def without_codecs() -> Iterator[None]:
    """Inside, emitted code sends and receives values as they are: for what looks at the rest of a stage."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)
