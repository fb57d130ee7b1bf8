"""keep_layouts: what a kernel may lay out in memory otherwise than foretold is laid out as it was captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from fxpipe.passes.analysis.foretold import is_block, is_foretold, lie_alike, order_in_memory
from torch import fx

from fxpipe.ir.program import INFO, Level, Program, info, value
from fxpipe.ir.transform import Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class KeepLayouts(Pass):
    """Lay values out as they were captured, where that is not certain, and the new value of a buffer as the buffer is.

    A program is traced on fake tensors, which foretell the strides of every result. What was traced behind a value
    relies on them: a view that its strides allow, a `.contiguous()` that did nothing and left no call, a kernel that
    takes nothing else. Where a kernel lays its result out otherwise, such a program fails or, worse, computes something
    else. So nothing relies on what is not certain (`fxpipe.passes.analysis.foretold`): the value passes through
    `contiguous` in the order in which its dimensions were foretold to lie in memory. That is free where they do.

    A buffer's new value is what the next step reads as that buffer.

    Before:                                     After:
        y = own.scan.default(xt)                    y = own.scan.default(xt)
        z = aten.view.default(y, [20, 8])           y_kept = aten.contiguous.default(y)
                                                    z = aten.view.default(y_kept, [20, 8])
    """

    name: ClassVar[str] = "keep_layouts"
    requires: ClassVar[Level] = Level.FOLDED
    provides: ClassVar[Level] = Level.FOLDED

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        for node in list(program):
            if not is_foretold(node):
                _keep(program.graph, node)
        _keep_buffers(program)
        return program


def _keep(graph: fx.Graph, node: fx.Node) -> None:
    """Let every call that reads the value read it as it was captured."""
    readers = [user for user in node.users if user.op == "call_function"]
    if readers and is_block(value(node)):
        kept = _laid_out(graph, node, value(node))
        for reader in readers:
            reader.replace_input_with(node, kept)


def _keep_buffers(program: Program) -> None:
    """Let every buffer keep its layout when it gets a new value."""
    results = list(program.output_nodes)
    placeholders = program.placeholders
    for i, output in enumerate(program.outputs):
        if output.kind == "buffer" and results[i].op == "call_function":
            held, new = value(placeholders[output.target]), value(results[i])
            if is_block(held) and not (is_foretold(results[i]) and lie_alike(held, new)):
                results[i] = _laid_out(program.graph, results[i], held)
    program.graph.output_node().args = (tuple(results),)


def _laid_out(graph: fx.Graph, node: fx.Node, like: torch.Tensor) -> fx.Node:
    """The value with its dimensions in memory in the order of those of `like`, called for right behind it."""
    order = order_in_memory(like)
    back = [order.index(d) for d in range(len(order))]
    steps: list[tuple[Any, tuple[Any, ...], str]] = [(aten.contiguous.default, (), "kept")]
    if 1 in like.shape:  # whose strides `contiguous` leaves alone, and `view` makes anew
        steps.append((aten.view.default, ([like.shape[d] for d in order],), "kept_shape"))
    if order != sorted(order):
        steps = [
            (aten.permute.default, (order,), "in_order"),
            *steps,
            (aten.permute.default, (back,), "kept_back"),
        ]
    made, before = node, node.next
    for target, args, name in steps:
        with graph.inserting_before(before):
            new = graph.create_node("call_function", target, (made, *args), name=f"{node.name}_{name}")
        new.meta = {**node.meta, "val": target(value(made), *args), INFO: info(node).copy()}
        made = new
    return made
