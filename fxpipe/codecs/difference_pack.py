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
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from fxpipe.codecs.codec import Codec, EdgeState
from fxpipe.codecs.encoded_pack import EncodedPack
from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import TensorSpec

KIND = "weights"
"""The kind of edge, for codecs."""


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
        self.differences = frozenset(differences)
        self._layouts = {name: Layout(specs[name], name) for name in differences}
        self._types = {name: getattr(torch, specs[name].dtype) for name in casts}
        sent = {**specs, **{name: replace(specs[name], dtype=dtype) for name, dtype in casts.items()}}
        self._message = EncodedPack(sent, codec, differences, KIND)
        self.sizes, self.bytes = self._message.sizes, self._message.bytes

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
        moved = {name: tensors[name].detach() - bases[name] for name in self.differences}
        states = {name: EdgeState(place=partial(tuple, (*place, name))) for name in self.differences}
        block = self._message.pack({**tensors, **moved}, states)
        return block, self.unpack(block, bases)

    def unpack(self, block: Tensor, bases: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode a block: views of it, and new tensors for differences and casts."""
        found = self._message.unpack(block)
        found |= {name: found[name].to(dtype) for name, dtype in self._types.items()}
        for name, layout in self._layouts.items():
            found[name] = torch.add(bases[name], found[name], out=layout.empty(block.device))
        return found
