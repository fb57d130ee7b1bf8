"""Several tensors as one message, some of them as encoded differences to what its receiver has of them already.

What the receiver makes of a difference is `base + decode(encode(value − base))`, and it is the base of the next one.
The sender computes the same, from the same bytes. The next difference therefore holds what this message has lost, so
that errors do not add up. A codec must not carry them over a second time: its state remembers nothing, and is there for
random numbers alone, other ones in each message. (`lowrank` would never send what is orthogonal to the same random
columns.) So a checkpoint need not hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fxpipe.codecs.codec import Codec, EdgeState
from fxpipe.plan.packing import ALIGNMENT, Layout, Pack
from fxpipe.plan.spec import TensorSpec

KIND = "weights"
"""Of edge, as codecs know it."""


def gains(codec: Codec, tensor: TensorSpec) -> bool:
    """Whether a codec writes such a tensor, and in fewer bytes of a message than it takes as it is."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if not dtype.is_floating_point or codec.refusal(tensor):
        return False
    return _aligned(codec.packed(tensor).bytes) < _aligned(tensor.bytes)


class DifferencePack:
    """One message: some tensors whole, the others as differences.

    Args:
        specs: of all tensors, by name, in the order of the message.
        codec: writes the differences; None if there are none.
        differences: the names of those that travel as differences.

    Attributes:
        bytes: the exact size of the message.
        sizes: by name, what each tensor takes of it, without what aligns the next one.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], codec: Codec | None, differences: Sequence[str] = ()) -> None:
        assert codec is not None or not differences
        self.names = tuple(specs)
        self.differences = frozenset(differences)
        self._codec = codec
        self._layouts = {name: Layout(specs[name], name) for name in differences}
        sent = {name: self._sent(spec, name) for name, spec in specs.items()}
        self._pack = Pack(list(sent.values()))
        self.sizes = {name: spec.bytes for name, spec in sent.items()}
        self.bytes = self._pack.bytes

    def pack(
        self, tensors: Mapping[str, Tensor], bases: Mapping[str, Tensor], place: tuple[object, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A new block, and what its receiver makes of it.

        Args:
            tensors: all, by name.
            bases: what the receiver has, at least of those that travel as differences; they are not changed.
            place: names this message alone, for the codec's random numbers; with the run's seed.

        Returns:
            The block, and by name tensors that nothing writes to: views of the block, and new ones.
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
        """What the receiver makes of a block: views of it, and new tensors where it holds differences."""
        found = dict(zip(self.names, self._pack.unpack(block), strict=True))
        for name in self.differences:
            found[name] = self._rebuilt(name, found[name], bases[name])
        return found

    def _encoded(self, difference: Tensor, place: tuple[object, ...]) -> Tensor:
        assert self._codec is not None
        state = EdgeState(place=lambda: place) if self._codec.keeps_state(KIND) else None
        return self._codec.encode(difference.contiguous(), state)

    def _rebuilt(self, name: str, packed: Tensor, base: Tensor) -> Tensor:
        assert self._codec is not None
        layout = self._layouts[name]
        difference = self._codec.decode(packed, layout.shape, layout.dtype)
        return torch.add(base, difference, out=layout.empty(base.device))

    def _sent(self, spec: TensorSpec, name: str) -> TensorSpec:
        return spec if self._codec is None or name not in self.differences else self._codec.packed(spec)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
