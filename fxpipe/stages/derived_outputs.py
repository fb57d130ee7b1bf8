"""Outputs that an engine need not compute: inputs, views, and what is made from nothing.

A view costs torch nothing, but an engine would write a copy. So an engine runs a part without these outputs, and torch
makes them from the engine's outputs: they share memory and have the same strides as in eager PyTorch. A slice would
keep all the memory alive that it is taken from, so the engine computes it, without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from fxpipe.ir.aten import is_getitem, is_random, is_view
from fxpipe.ir.program import copy_graph
from fxpipe.stages.pure_part import PartOutput, PurePart
from fxpipe.task.batch import tensor_spec

aten = torch.ops.aten


@dataclass(frozen=True)
class TrimmedPart:
    """A part for an engine, and a graph for the other outputs.

    Attributes:
        inner: what the engine computes, with each input that it reads and each output that it must make once.
        takes: the indices of the part's inputs that `inner` takes.
        derive: makes all outputs of the part from all its inputs and the outputs of `inner`.
    """

    inner: PurePart
    takes: tuple[int, ...]
    derive: fx.GraphModule

    def finish(self, inputs: Sequence[Tensor], computed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The part's outputs."""
        result: tuple[Tensor, ...] = self.derive(*inputs, *computed)
        return result


def trim(part: PurePart) -> TrimmedPart:
    """Split a part into what an engine computes and what costs nothing."""
    outputs = list(part.graph.graph.output_node().args[0])  # type: ignore[arg-type]
    bases = {node: _base(node) for node in dict.fromkeys(outputs)}
    needed = {base: outputs.index(node) for node, base in reversed(bases.items()) if not _is_free(base)}
    rows = {b: part.outputs[i] if outputs[i] is b else _row(b, part.outputs[i]) for b, i in needed.items()}
    order = sorted(rows, key=needed.__getitem__)

    inner = copy_graph(part.graph.graph)
    names = {n.name: n for n in inner.nodes}
    inner.erase_node(inner.output_node())
    output = inner.output(tuple(names[b.name] for b in order))
    output.meta["val"] = tuple(b.meta["val"] for b in order)
    inner.eliminate_dead_code(lambda n: n.op != "call_function")
    holders = [n for n in inner.nodes if n.op == "placeholder"]
    takes = tuple(i for i, n in enumerate(holders) if n.users)
    for n in holders:
        if not n.users:
            inner.erase_node(n)
    small = replace(
        part,
        graph=fx.GraphModule(part.graph, inner),
        inputs=tuple(part.inputs[i] for i in takes),
        outputs=tuple(rows[b] for b in order),
        draws=(),
    )
    return TrimmedPart(small, takes, _derive(part.graph, outputs, order))


def _base(node: fx.Node) -> fx.Node:
    """The value that an engine must compute so that `node` costs nothing: a value of which `node` is a whole view."""
    size = node.meta["val"].numel()
    base = node
    while _is_free_view(node):
        node = node.all_input_nodes[0]
        if node.op == "placeholder" or _is_free(node) or node.meta["val"].numel() <= size:
            base = node
    return base


def _is_free_view(node: fx.Node) -> bool:
    """Whether a node is a view; not as_strided, which depends on the memory layout of its input."""
    return (
        node.op == "call_function"
        and is_view(node)
        and not is_getitem(node)
        and node.target is not aten.as_strided.default
        and len(node.all_input_nodes) == 1
    )


def _is_free(node: fx.Node) -> bool:
    """Whether a node is an input, or has no inputs: every call makes it again."""
    return node.op == "placeholder" or not (node.all_input_nodes or is_random(node))


def _row(base: fx.Node, output: PartOutput) -> PartOutput:
    return replace(output, tensor=tensor_spec(base.meta["val"]))


def _derive(root: fx.GraphModule, outputs: Sequence[fx.Node], computed: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in root.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(node.name)
    for i, node in enumerate(computed):
        copies[node] = graph.placeholder(f"computed_{i}")

    def make(node: fx.Node) -> fx.Node:
        chain = []
        while node not in copies:
            chain.append(node)
            if not node.all_input_nodes:
                break
            node = node.all_input_nodes[0]
        for link in reversed(chain):
            copies[link] = graph.node_copy(link, copies.__getitem__)
        return copies[chain[0]] if chain else copies[node]

    graph.output(tuple(make(node) for node in outputs))
    return fx.GraphModule(root, graph)
