"""Send and Recv, packing between them, and sums over replicas, as nodes of the program's graph.

In the joint graph a Recv takes its Send, and both return the value unchanged, so a wired program still runs in one
process. In a stage they become `comm.send("edge", value)` and `value = comm.recv("edge")`, and packing becomes
`int8.pack(value)` and `int8.unpack(packed, …)`.

The call that hands gradients over to be added up by replicas, `comm.all_reduce("bucket", [g1, g2])`, returns no value,
neither here nor in a stage: the graph is for one microbatch, and the sum is over all of them.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Sequence

import torch
from torch import fx

from fxpipe.codecs import codec as make_codec
from fxpipe.codecs.codec import EdgeState

_ARGUMENTS = ("weights", "buffers", "batch", "saved", "deferred", "values", "comm")
TAKEN = ("torch", "aten", "codec", "forward", "backward", *_ARGUMENTS)
"""Names that emitted code uses for its own things."""


def free_name(name: str, taken: set[str]) -> str:
    """The name for emitted code, with a number after it if another thing or Python has it; from then on it is taken."""
    base, count = name, 1
    while name in taken or name in TAKEN or keyword.iskeyword(name) or hasattr(builtins, name):
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


def send(value: torch.Tensor) -> torch.Tensor:
    """The sending end of an edge."""
    return value


def recv(sent: torch.Tensor) -> torch.Tensor:
    """The receiving end of an edge."""
    return sent


def pack(value: torch.Tensor, codec: str, edge: str | None) -> torch.Tensor:
    """The codec's form of a value before it is sent; `edge` is the one whose state the codec uses, if it keeps one."""
    return make_codec(codec).pack(value, None if edge is None else EdgeState(place=lambda: (edge,)))


def unpack(
    packed: torch.Tensor, codec: str, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
) -> torch.Tensor:
    """The value that a codec reads from what was received."""
    return make_codec(codec).unpack(packed, shape, dtype, stride)


def all_reduce(bucket: str, gradients: Sequence[torch.Tensor | None]) -> None:
    """Hand a microbatch's gradients over, to be added up over microbatches and replicas; every replica gets the sums.

    A gradient is None for a parameter without one.
    """


def reduce_scatter(bucket: str, gradients: Sequence[torch.Tensor | None]) -> None:
    """The same, but every replica gets only its own part of the sums."""


def is_pack(node: fx.Node) -> bool:
    return node.target is pack


def is_unpack(node: fx.Node) -> bool:
    return node.target is unpack


def codec_of(node: fx.Node) -> str:
    """The codec of a node that packs or unpacks, as `--codec` has it."""
    return str(node.args[1])


def variable(codec: str) -> str:
    """The name of a codec in emitted code: `topk_0_01`; with `_` after it if another thing has that name."""
    name = "".join(c if c.isalnum() else "_" for c in codec)
    return f"{name}_" if name in TAKEN else name


def is_reduce(node: fx.Node) -> bool:
    """Whether a node hands gradients to the worker's replicas to add up."""
    return node.target is all_reduce or node.target is reduce_scatter


def bucket_of(node: fx.Node) -> str:
    """The name of the bucket that such a node hands over."""
    return str(node.args[0])


def members_of(node: fx.Node) -> list[fx.Node | None]:
    """The gradients that it hands over, None for a parameter without one."""
    return list(node.args[1])  # type: ignore[arg-type]


def is_send(node: fx.Node) -> bool:
    return node.target is send


def is_recv(node: fx.Node) -> bool:
    return node.target is recv
