"""Several tensors as one message, some of them encoded, or as encoded differences from what the receiver has already.

The receiver decodes a difference as `base + decode(encode(value − base))`, which is the base of the next one. The
sender computes the same from the same bytes. So the next difference has what this message has lost, and errors do not
add up. A codec must not carry them over a second time: its state has no memory, and is only for random numbers, which
differ in each message. (With the same random columns, `lowrank` would never send what is orthogonal to them.) So a
checkpoint does not need this state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from fxpipe.codecs import codec as make_codec
from fxpipe.codecs.codec import OUTER, Codec, EdgeState
from fxpipe.plan.packing import ALIGNMENT, Layout, Pack
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import TensorSpec


def gains(codec: Codec, tensor: TensorSpec) -> bool:
    """Whether a codec encodes such a tensor, and saves bytes of the message."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if not dtype.is_floating_point or codec.refusal(tensor):
        return False
    return _aligned(codec.packed(tensor).bytes) < _aligned(tensor.bytes)


class EncodedPack:
    """One message: some tensors `encoded`, for this `kind` of edge, the others as they are, in the order of `specs`.

    Attributes:
        bytes: the exact size of the message.
        sizes: by name, the bytes of each tensor, without padding.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], codec: Codec | None, encoded: Collection[str], kind: str
    ) -> None:
        assert codec is not None or not encoded
        self._codecs = {name: codec for name in encoded if codec is not None}
        self._layouts = {name: Layout(spec, name) for name, spec in specs.items()}
        self._kind = kind
        sent = {n: self._codecs[n].packed(spec) if n in self._codecs else spec for n, spec in specs.items()}
        self._pack = Pack(list(sent.values()))
        self.sizes = {name: spec.bytes for name, spec in sent.items()}
        self.bytes = self._pack.bytes

    def pack(self, tensors: Mapping[str, Tensor], states: Mapping[str, EdgeState]) -> Tensor:
        """A new block; codecs that keep a state change those of the encoded tensors."""
        values = []
        for name in self.sizes:
            value = tensors[name].detach()
            if codec := self._codecs.get(name):
                value = codec.pack(value, states[name] if codec.keeps_state(self._kind) else None)
            values.append(value)
        return self._pack.pack(values)

    def unpack(self, block: Tensor) -> dict[str, Tensor]:
        """All tensors of a block by name: views of it, and new ones, row by row, where they were encoded."""
        tensors = dict(zip(self.sizes, self._pack.unpack(block), strict=True))
        for name, codec in self._codecs.items():
            layout = self._layouts[name]
            tensors[name] = codec.unpack(tensors[name], layout.shape, layout.dtype)
        return tensors


class DifferencePack:
    """One message of weights in the order of `specs`: some tensors whole, the others as differences, which are encoded.

    `casts` are the types in which whole tensors are sent and read, by name, if these are not their own. `bytes` and
    `sizes` are as of `EncodedPack`.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        codec: Codec | None,
        differences: Sequence[str] = (),
        casts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.differences = frozenset(differences)
        self._layouts = {name: Layout(specs[name], name) for name in differences}
        sent = {**specs, **{name: replace(specs[name], dtype=dtype) for name, dtype in casts.items()}}
        self._message = EncodedPack(sent, codec, differences, "weights")
        self.sizes, self.bytes = self._message.sizes, self._message.bytes

    def pack(
        self, tensors: Mapping[str, Tensor], bases: Mapping[str, Tensor], place: tuple[object, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A new block, and the tensors that its receiver decodes from it.

        The tensors must not be written to: some are views of the block.

        Args:
            bases: the receiver's values, at least of tensors that are sent as differences; not changed.
            place: identifies this message, with the run's seed, for the codec's random numbers.
        """
        moved = {name: tensors[name].detach() - bases[name] for name in self.differences}
        states = {name: EdgeState(place=partial(tuple, (*place, name))) for name in self.differences}
        block = self._message.pack({**tensors, **moved}, states)
        return block, self.unpack(block, bases)

    def unpack(self, block: Tensor, bases: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode a block: views of it, and new tensors for differences."""
        tensors = self._message.unpack(block)
        for name, layout in self._layouts.items():
            tensors[name] = torch.add(bases[name], tensors[name], out=layout.empty(block.device))
        return tensors


def outer_message(text: str, specs: Mapping[str, TensorSpec]) -> EncodedPack:
    """The message of one replica: each parameter encoded if that saves bytes.

    Raises:
        CodecError: there is no such codec.
    """
    codec = make_codec(text)
    return EncodedPack(specs, codec, [name for name, spec in specs.items() if gains(codec, spec)], OUTER)


def outer_bytes(plan: Plan, worker: int, text: str) -> float:
    """The bytes that each replica of a worker sends in an outer step with this codec, or with '' for none.

    Without one, R replicas add up vectors, and each sends 2(R − 1)/R of them; else each sends a message to all others.

    Raises:
        CodecError: there is no such codec.
    """
    replicas, trained = plan.replicas_of(worker), {p.name: p.tensor for p in plan.owned(worker) if p.trained}
    if text:
        return (replicas - 1) * outer_message(text, trained).bytes
    return 2 * (replicas - 1) / replicas * sum(spec.bytes for spec in trained.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
