"""Several tensors as one message, some of them as encoded differences from the values that the receiver has already.

The receiver decodes a difference as `base + decode(encode(value − base))`, which is the base of the next one. The
sender computes the same from the same bytes. So the next difference has what this message has lost, and errors do not
add up. A codec must not carry them over a second time: its state has no memory, and is only for random numbers, which
differ in each message. (With the same random columns, `lowrank` would never send what is orthogonal to them.) So a
checkpoint does not need this state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from fxpipe.codecs.codec import Codec, EdgeState
from fxpipe.plan.packing import ALIGNMENT, Layout, Pack
from fxpipe.plan.spec import TensorSpec

KIND = "weights"
"""The kind of edge, for codecs."""


def gains(codec: Codec, tensor: TensorSpec) -> bool:
    """Whether a codec encodes such a tensor, and saves bytes of the message."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if not dtype.is_floating_point or codec.refusal(tensor):
        return False
    return _aligned(codec.packed(tensor).bytes) < _aligned(tensor.bytes)


class DifferencePack:
    """One message: some tensors whole, the others as differences.

    Args:
        specs: of all tensors, by name, in the order of the message.
        codec: writes the differences; None if there are none.
        differences: the names of tensors that are sent as differences.
        casts: the types in which others are sent, by name, if these are not their own.

    Attributes:
        bytes: the exact size of the message.
        sizes: by name, the bytes of each tensor, without padding.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        codec: Codec | None,
        differences: Sequence[str] = (),
        casts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        assert codec is not None or not differences
        self.names = tuple(specs)
        self.differences = frozenset(differences)
        self._codec = codec
        self._layouts = {name: Layout(specs[name], name) for name in differences}
        self._types = {name: getattr(torch, specs[name].dtype) for name in casts}
        sent = {name: self._sent(spec, name, casts.get(name)) for name, spec in specs.items()}
        self._pack = Pack(list(sent.values()))
        self.sizes = {name: spec.bytes for name, spec in sent.items()}
        self.bytes = self._pack.bytes

    def pack(
        self, tensors: Mapping[str, Tensor], bases: Mapping[str, Tensor], place: tuple[object, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A new block, and the tensors that its receiver decodes from it.

        Args:
            tensors: all, by name.
            bases: the receiver's values, at least of tensors that are sent as differences; not changed.
            place: identifies this message, with the run's seed, for the codec's random numbers.

        Returns:
            The block, and by name tensors that must not be written to: views of the block, and new ones.
        """
        values = []
        for name in self.names:
            value = tensors[name].detach()
            if name in self.differences:
                value = self._encoded(value - bases[name], (*place, name))
            values.append(value)
        block = self._pack.pack(values)
        return block, self.unpack(block, bases)

    def unpack(self, block: Tensor, bases: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode a block: views of it, and new tensors for differences and casts."""
        found = dict(zip(self.names, self._pack.unpack(block), strict=True))
        found |= {name: found[name].to(dtype) for name, dtype in self._types.items()}
        for name in self.differences:
            found[name] = self._rebuilt(name, found[name], bases[name])
        return found

    def _encoded(self, difference: Tensor, place: tuple[object, ...]) -> Tensor:
        assert self._codec is not None
        state = EdgeState(place=lambda: place) if self._codec.keeps_state(KIND) else None
        return self._codec.pack(difference, state)

    def _rebuilt(self, name: str, packed: Tensor, base: Tensor) -> Tensor:
        assert self._codec is not None
        layout = self._layouts[name]
        difference = self._codec.unpack(packed, layout.shape, layout.dtype)
        return torch.add(base, difference, out=layout.empty(base.device))

    def _sent(self, spec: TensorSpec, name: str, cast: str | None) -> TensorSpec:
        if name in self.differences:
            assert self._codec is not None
            return self._codec.packed(spec)
        return spec if cast is None else replace(spec, dtype=cast)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
