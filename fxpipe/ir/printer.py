"""Programs as text: readable as Python, the same on every machine and in every run.

Each group of lines begins with its module path and the user's line; after each line the value's type and, as far as
they are known, its phase, unit, worker and cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.ir.aten import is_getitem
from fxpipe.ir.program import INFO, ONE_DRAW, NodeInfo, Program, info, size_of
from fxpipe.ir.short_calls import short_call
from fxpipe.ir.wire import bucket_of, codec_of, is_pack, is_recv, is_reduce, is_send, is_unpack, variable
from fxpipe.planner.quantity import size
from fxpipe.torch_private import OpOverload

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def type_text(value: Any) -> str:
    """`f32[4, 128]`; a tuple's members in parentheses."""
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(int(s)) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(type_text(v) for v in value) + ")"
    return type(value).__name__


def call_text(node: fx.Node, name: Callable[[fx.Node], str], short: bool = False) -> str:
    """The call as Python source: `aten.mm.default(a, b)`.

    Args:
        name: gives the Python name of an input node.
        short: `torch.mm(a, b)`, where that is the same.
    """
    if is_getitem(node):
        return f"{argument_text(node.args[0], name)}[{node.args[1]}]"
    if is_pack(node) or is_unpack(node):
        return _codec_call(node, name)
    target = node.target
    if is_reduce(node):
        return f'comm.{target.__name__}("{bucket_of(node)}", {argument_text(node.args[1], name)})'  # type: ignore[union-attr]
    arguments = [argument_text(a, name) for a in node.args]
    named = [f"{k}={argument_text(v, name)}" for k, v in node.kwargs.items()]
    if short and (spelling := short_call(node)):
        return spelling(arguments, named)
    if isinstance(target, OpOverload):
        function = str(target) if target.namespace == "aten" else f"torch.ops.{target}"
    else:
        function = f"{target.__module__}.{target.__qualname__}"  # type: ignore[union-attr]
    return f"{function}({', '.join([*arguments, *named])})"


def _codec_call(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    """`int8.pack(h)`, with the sender's state of the edge if the codec keeps one; `int8.unpack(h_packed, …)`."""
    value, _, *more = node.args
    called = f"{variable(codec_of(node))}.{'pack' if is_pack(node) else 'unpack'}"
    if is_unpack(node):
        return f"{called}({', '.join(argument_text(a, name) for a in (value, *more))})"
    state = f', comm.state("{more[0]}")' if more[0] is not None else ""
    return f"{called}({argument_text(value, name)}{state})"


def bucket_text(node: fx.Node, replicas: int) -> str:
    """What a node hands over to be added up: `24.9 MiB over 2 replicas`."""
    return f"{size(info(node).bytes or 0)} over {replicas} replicas"


def argument_text(value: Any, name: Callable[[fx.Node], str]) -> str:
    """One argument as Python source that evaluates back to it."""
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(argument_text(v, name) for v in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, float):
        # inf and nan have no literal of their own
        return repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    return repr(value)


def heading(record: NodeInfo, inside: str = "") -> str:
    """`blocks.0.attn · gpt.py:41: q, k, v = …`, or as much of it as is known; `attn · …` inside `blocks.0`."""
    place = f"{record.source}: {record.text}" if record.source else ""
    module = record.module
    if inside and f"{module}.".startswith(f"{inside}."):
        module = module[len(inside) + 1 :]
    return " · ".join(part for part in (module, place) if part)


def print_program(program: Program) -> str:
    """The whole program, one line per node."""
    return "\n".join(_lines(program)) + "\n"


def _lines(program: Program) -> Iterator[str]:
    yield f"# {program.level.name}: {len(program.graph.nodes)} nodes, {len(program.units)} units"
    types = {name: type_text(node.meta["val"]) for name, node in program.placeholders.items()}
    for p in program.parameters:
        kind = "parameter" if p.trained else "frozen parameter"
        yield f"{p.node} = {kind}({', '.join(map(repr, p.names))})  # {types[p.node]}"
    for b in program.buffers:
        kind = "constant" if b.constant else "buffer"
        yield f"{b.node} = {kind}({', '.join(map(repr, b.names))})  # {types[b.node]}"
    for i in program.batch:
        if i.node:
            yield f"{i.node} = {i.leaf.name}  # {types[i.node]}"
    for worker, again in enumerate(program.again):
        if again.values:
            yield f"# backward of worker {worker} computes again: {', '.join(again.values)}"
    last = ""
    for node in program:
        record = info(node)
        title = f"{'W' if record.weight else record.phase} {heading(record)}"
        if title != last:
            yield f"# {title}"
            last = title
        yield _line(program, node)
    names = [f"{o.kind} {o.target}".strip() for o in program.outputs]
    yield "# outputs: " + ", ".join(f"{n.name} ({k})" for n, k in zip(program.output_nodes, names, strict=True))


def _line(program: Program, node: fx.Node) -> str:
    if is_send(node):
        edge = program.wires[node.name]
        return f"{node.name} = send({node.args[0]}, to={edge.dst}, kind={edge.kind!r})"
    if is_reduce(node):
        worker = info(node).worker or 0
        return f"{call_text(node, str)}  # {bucket_text(node, program.replicas[worker])} u{info(node).unit} w{worker}"
    if is_recv(node):
        edge = program.wires[node.name]
        text = f"recv({node.args[0]}, peer={edge.src}, kind={edge.kind!r})"
    else:
        text = call_text(node, str)
    return f"{node.name} = {text}  # {_comment(node)}"


def _comment(node: fx.Node) -> str:
    record = info(node)
    parts: Sequence[str] = [
        type_text(node.meta.get("val")),
        f"u{record.unit}" if record.unit >= 0 else "",
        f"w{record.worker}" if record.worker is not None else "",
        f"{size_of(node.meta.get('val'))} B" if INFO in node.meta and record.bytes is not None else "",
        ONE_DRAW if ONE_DRAW in node.meta else "",
    ]
    return " ".join(p for p in parts if p)
