"""Several tensors as one message, some of them encoded."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from fxpipe.codecs.codec import Codec, EdgeState
from fxpipe.plan.packing import ALIGNMENT, Layout, Pack
from fxpipe.plan.spec import TensorSpec


def gains(codec: Codec, tensor: TensorSpec) -> bool:
    """Whether a codec encodes such a tensor, and saves bytes of the message."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if not dtype.is_floating_point or codec.refusal(tensor):
        return False
    return _aligned(codec.packed(tensor).bytes) < _aligned(tensor.bytes)


class EncodedPack:
    """One message: some tensors encoded, the others as they are.

    Args:
        specs: of all tensors, by name, in the order of the message.
        codec: encodes; None if no tensor is encoded.
        encoded: the names of the encoded tensors.
        kind: what the codec is used for.

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
        """A new block.

        Args:
            tensors: all, by name.
            states: of encoded tensors, by name; codecs that keep a state change them.
        """
        values = []
        for name in self.sizes:
            value = tensors[name].detach()
            if codec := self._codecs.get(name):
                value = codec.pack(value, states[name] if codec.keeps_state(self._kind) else None)
            values.append(value)
        return self._pack.pack(values)

    def unpack(self, block: Tensor) -> dict[str, Tensor]:
        """All tensors of a block by name: views of it, and new ones, row by row, where they were encoded."""
        found = dict(zip(self.sizes, self._pack.unpack(block), strict=True))
        for name, codec in self._codecs.items():
            layout = self._layouts[name]
            found[name] = codec.unpack(found[name], layout.shape, layout.dtype)
        return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
