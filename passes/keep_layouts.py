"""keep_layouts: a result whose strides a kernel may choose differently gets the strides that capture saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpipe.ir.program import INFO, Level, Program, info, value
from fxpipe.ir.transform import Pass
from fxpipe.passes.analysis.predicted_strides import is_block, is_predicted, order_in_memory, same_strides

aten = torch.ops.aten


@dataclass(frozen=True)
class KeepLayouts(Pass):
    """Give values the strides of capture where those are not certain, and a buffer's new value the buffer's strides.

    A program is traced on fake tensors, which predict the strides of every result. What was traced after a value
    relies on them: a view that its strides allow, a `.contiguous()` that did nothing and left no call, a kernel that
    accepts nothing else. If a kernel chooses other strides, such a program fails or, worse, computes something else. So
    a value with uncertain strides (`fxpipe.passes.analysis.predicted_strides`) passes through `contiguous` in the
    predicted order of its dimensions in memory. That is free if the prediction is right.

    The next step reads a buffer's new value as that buffer.

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
            if not is_predicted(node):
                _keep(program.graph, node)
        _keep_buffers(program)
        return program


def _keep(graph: fx.Graph, node: fx.Node) -> None:
    """Let every call that reads the value read it with its captured strides."""
    readers = [user for user in node.users if user.op == "call_function"]
    if readers and is_block(value(node)):
        laid_out = _laid_out(graph, node, value(node))
        for reader in readers:
            reader.replace_input_with(node, laid_out)


def _keep_buffers(program: Program) -> None:
    """Let every buffer keep its layout when it gets a new value."""
    results = list(program.output_nodes)
    placeholders = program.placeholders
    for i, output in enumerate(program.outputs):
        if output.kind == "buffer" and results[i].op == "call_function":
            held, new = value(placeholders[output.target]), value(results[i])
            if is_block(held) and not (is_predicted(results[i]) and same_strides(held, new)):
                results[i] = _laid_out(program.graph, results[i], held)
    program.graph.output_node().args = (tuple(results),)


def _laid_out(graph: fx.Graph, node: fx.Node, like: torch.Tensor) -> fx.Node:
    """The value with its dimensions in memory in the order of those of `like`, computed right after it."""
    order = order_in_memory(like)
    back = [order.index(d) for d in range(len(order))]
    steps: list[tuple[Any, tuple[Any, ...], str]] = [(aten.contiguous.default, (), "kept")]
    if 1 in like.shape:  # `contiguous` keeps their strides, and `view` makes new ones
        steps.append((aten.view.default, ([like.shape[d] for d in order],), "kept_shape"))
    if order != sorted(order):
        steps = [(aten.permute.default, (order,), "in_order"), *steps, (aten.permute.default, (back,), "kept_back")]
    result, before = node, node.next
    for target, args, name in steps:
        with graph.inserting_before(before):
            new = graph.create_node("call_function", target, (result, *args), name=f"{node.name}_{name}")
        new.meta = {**node.meta, "val": target(value(result), *args), INFO: info(node).copy()}
        result = new
    return result
