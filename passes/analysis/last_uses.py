"""Where the code of a part drops its values: after the last call that reads them."""

from __future__ import annotations

from torch import fx

from fxpipe.ir.stage import Part
from fxpipe.ir.wire import is_reduce, is_send


def last_uses(part: Part) -> dict[fx.Node, list[fx.Node]]:
    """By node, the values that are dropped after it: those with memory that nothing below reads.

    Weights and buffers are not the part's to drop.
    """
    last: dict[fx.Node, fx.Node] = {}
    for node in part.graph.nodes:
        if node.op == "call_function" and not (is_send(node) or is_reduce(node)):
            last[node] = node  # until something reads it
        for source in node.all_input_nodes:
            last[source] = node
    given = len(part.spec.weights) + len(part.spec.buffers)
    kept = {n for n in list(part.graph.nodes)[:given] if n.op == "placeholder"}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last.items():
        if reader.op != "output" and node not in kept:
            dying.setdefault(reader, []).append(node)
    return dying
