"""The calls that serve only the metrics of a training step, and the program without them.

They do not affect the plan: they open no units, and units are planned without them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx

from fxpipe.ir.aten import is_getitem
from fxpipe.ir.program import Program, info


def loss_itself(program: Program) -> fx.Node | None:
    """The loss without the metrics that `join_metrics` has put after it; None for an evaluation."""
    joined = program.loss_node
    return joined.args[0][0] if joined is not None and program.loss_metrics else joined  # type: ignore[index, return-value]


def metric_nodes(program: Program, kept: Collection[str] = ()) -> list[fx.Node]:
    """The calls whose values go only into the metrics, in order; the one that joins them to the loss is last.

    The metrics that are `kept` count like any other output.
    """
    outputs = zip(program.output_nodes, program.outputs, strict=True)
    left_out = {"loss" if program.loss_metrics else "metric"}
    needed = {n for n, o in outputs if o.kind not in left_out or o.target in kept}
    needed |= {n for n in [loss_itself(program)] if n is not None}
    ends, nodes = set(program.output_nodes), []
    for node in reversed(list(program)):
        if node in needed or (node not in ends and not node.users) or any(user in needed for user in node.users):
            needed.add(node)
        else:
            nodes.append(node)
    return nodes[::-1]


def without_metrics(program: Program) -> Program:
    """The program with only the loss; unchanged if it has no metrics."""
    if not program.loss_metrics:
        return program
    program = program.copy()
    loss, joined, extra = loss_itself(program), program.loss_node, metric_nodes(program)
    program.graph.output_node().args = (tuple(loss if n is joined else n for n in program.output_nodes),)
    for node in reversed(extra):
        program.graph.erase_node(node)
    return replace(program, loss_metrics=())


def place_metrics(nodes: Collection[fx.Node], last_reader: dict[fx.Node, int]) -> None:
    """Give calls of metrics the units of their inputs, when all other calls have theirs.

    The model's own tensors count for the last unit whose forward reads them: no worker gets more weights for metrics.
    """
    for node in nodes:
        near = [info(n).unit if n.op == "call_function" else last_reader.get(n, -1) for n in node.all_input_nodes]
        info(node).unit = max(near, default=-1)
    for node in reversed(list(nodes)):  # made only from the batch: where it is read
        if info(node).unit < 0:
            info(node).unit = min((info(n).unit for n in node.users if n.op == "call_function"), default=0)
    for node in nodes:
        if is_getitem(node):  # a tuple never crosses workers, its elements do
            info(node).unit = info(node.all_input_nodes[0]).unit
