"""encode: values are packed before they are sent, and unpacked where they are received."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxpipe.codecs import codec
from fxpipe.ir import wire
from fxpipe.ir.program import INFO, Level, Program, info, size_of, value
from fxpipe.ir.stage import name_in_part
from fxpipe.ir.transform import Pass
from fxpipe.plan.cost_records import CodecTimes
from fxpipe.plan.packing import contiguous_stride
from fxpipe.plan.spec import EdgeSpec, TensorSpec


@dataclass(frozen=True)
class Encode(Pass):
    """Give edges their codecs.

    A value that several workers get with the same codec is packed once, unless the codec keeps a state for each edge. A
    worker that hands a value on sends it as received, so the value loses no more on the way.

    Fields:
        codecs: by edge, the codec's text; other edges stay unchanged.
        times: the seconds of codecs; others count as free.

    Before:  h_send = send(h, to=1)  # w0        After:  h_int8 = int8.pack(h)  # w0
             h_recv = recv(h_send)  # w1                 h_send = send(h_int8, to=1)  # w0
             y = mm(h_recv, w)  # w1                     h_recv = recv(h_send)  # w1
                                                         h_unpack = int8.unpack(h_recv, …)  # w1
                                                         y = mm(h_unpack, w)  # w1
    """

    name: ClassVar[str] = "encode"
    requires: ClassVar[Level] = Level.WIRED
    provides: ClassVar[Level] = Level.WIRED

    codecs: Mapping[str, str] = field(default_factory=dict)
    times: Mapping[str, CodecTimes] = field(default_factory=dict)

    def __call__(self, program: Program) -> Program:
        program = program.copy(level=Level.WIRED)
        wires = dict(program.wires)
        packed: dict[tuple[fx.Node, str], fx.Node] = {}
        for node in list(program.graph.nodes):
            edge = program.wires.get(node.name)
            if edge is None or not (text := self.codecs.get(edge.name)):
                continue
            edge = wires[node.name] = replace(edge, codec=text, packed=codec(text).packed(edge.tensor))
            times = self.times.get(text, CodecTimes())
            if wire.is_send(node):
                _pack(node, edge, packed, times.pack * edge.tensor.bytes)
            else:
                _unpack(node, edge, times.unpack * edge.tensor.bytes)
        return replace(program, wires=wires)


def _pack(send: fx.Node, edge: EdgeSpec, packed: dict[tuple[fx.Node, str], fx.Node], seconds: float) -> None:
    """Let a Send take the codec's output for its value, packed right before the first Send that takes it."""
    (source,) = send.all_input_nodes
    if wire.is_unpack(source) and wire.codec_of(source) == edge.codec:
        _carry(send, source.all_input_nodes[0])
        return
    state = edge.name if codec(edge.codec).keeps_state(edge.kind) else None
    pack = packed.get((source, edge.codec)) if state is None else None
    if pack is None:
        name = f"{name_in_part(source)}_{wire.variable(edge.codec)}"
        pack = _before(send, wire.pack, (source, edge.codec, state), name, seconds, _value(edge))
        packed[source, edge.codec] = pack
    _carry(send, pack)


def _carry(send: fx.Node, packed: fx.Node) -> None:
    send.args = (packed,)
    send.meta["val"] = packed.meta["val"]
    send.meta[INFO].bytes = size_of(value(packed))


def _unpack(recv: fx.Node, edge: EdgeSpec, seconds: float) -> None:
    """Let all readers of a Recv read the codec's output."""
    users, plain = list(recv.users), recv.meta["val"]
    tensor = edge.tensor
    args: list[Any] = [recv, edge.codec, list(tensor.shape), getattr(torch, tensor.dtype)]
    if tensor.stride != contiguous_stride(tensor.shape):
        args.append(list(tensor.stride))
    name = f"{name_in_part(recv)}_unpack_{edge.dst}"
    unpacked = _before(recv.next, wire.unpack, tuple(args), name, seconds, plain, like=recv)
    for user in users:
        user.replace_input_with(recv, unpacked)
    recv.meta["val"] = _value(edge)
    recv.meta[INFO].bytes = size_of(value(recv))


def _before(
    place: fx.Node, target: Any, args: tuple[Any, ...], name: str, seconds: float, val: Any, like: fx.Node | None = None
) -> fx.Node:
    """A new call before another; it belongs where `like` does, or else where the other one does."""
    with place.graph.inserting_before(place):
        call = place.graph.create_node("call_function", target, args, {}, name=name)
    call.meta["val"] = val
    call.meta[INFO] = info(like or place).copy()
    call.meta[INFO].bytes, call.meta[INFO].seconds = size_of(val), seconds
    return call


def _value(edge: EdgeSpec) -> torch.Tensor:
    sent: TensorSpec = edge.sent
    return torch.empty(sent.shape, dtype=getattr(torch, sent.dtype), device="meta")
