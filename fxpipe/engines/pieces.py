"""A backward in pieces: between them, an engine's caller begins to add up over replicas the gradients that are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import fx

from fxpipe.ir.aten import is_getitem
from fxpipe.stages.pure_part import PartInput, PartOutput, PurePart
from fxpipe.task.batch import tensor_spec

MOST, LEAST_BYTES = 4, 4 * 2**20
"""At most how many pieces, and how many bytes of gradients each has at least.

After the last piece, a fourth is still to be added up. Each piece more takes an engine up to 0.8 ms a call on a CPU.
"""


@dataclass(frozen=True)
class Piece:
    """What an engine computes without a pause."""

    part: PurePart  # the piece as a part
    # its inputs, by index among the whole part's inputs, followed by what earlier pieces pass on
    takes: tuple[int, ...]
    gives: tuple[int, ...]  # its first outputs, by index among the whole part's; it passes on the others


def pieces(part: PurePart) -> tuple[Piece, ...]:
    """The part in pieces with about equal bytes of gradients, each with whole buckets."""
    graph, places = part.graph.graph, _places(part)
    results: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    sources = [node for node in graph.nodes if node.op == "placeholder"]
    rows = list(part.inputs)
    small_pieces = []
    for place in range(1 + max(places.values(), default=0)):
        nodes = [node for node in graph.nodes if places.get(node) == place]
        gives = [i for i, node in enumerate(results) if places.get(node, 0) == place]
        outputs = [results[i] for i in gives]
        takes = [i for i, n in enumerate(sources) if n in outputs or any(places.get(user) == place for user in n.users)]
        later = [n for n in nodes if n.op != "get_attr" and any(places.get(user, place) > place for user in n.users)]
        passed = [PartOutput("saved", node.name, tensor_spec(node.meta["val"])) for node in later]
        small = replace(
            part,
            graph=_graph(part, nodes, [sources[i] for i in takes], [*outputs, *later]),
            inputs=tuple(rows[i] for i in takes),
            outputs=(*(part.outputs[i] for i in gives), *passed),
        )
        small_pieces.append(Piece(small, tuple(takes), tuple(gives)))
        sources += later
        rows += [PartInput("saved", row.name, row.tensor) for row in passed]
    return tuple(small_pieces)


def _places(part: PurePart) -> dict[fx.Node, int]:
    """The piece of each node: the first whose gradients need it, or the last."""
    results: list[fx.Node] = list(part.graph.graph.output_node().args[0])  # type: ignore[arg-type]
    members = [[results[i] for i in bucket.outputs if i is not None] for bucket in part.handed]
    sizes = [sum(node.meta["val"].nbytes for node in bucket) for bucket in members]
    count = max(1, min(MOST, sum(sizes) // LEAST_BYTES))
    groups: list[list[fx.Node]] = [[] for _ in range(count)]
    for bucket, upto in zip(members, accumulate(sizes), strict=True):
        groups[max(0, -(-upto * count // sum(sizes)) - 1) if upto else 0] += bucket
    groups[-1] += results
    places: dict[fx.Node, int] = {}
    for place, left in enumerate(groups):
        while left:
            node = left.pop()
            if node not in places and node.op != "placeholder":
                places[node] = place
                left += node.all_input_nodes
    for node in part.graph.graph.nodes:
        if is_getitem(node) and node in places:
            places[node] = places[node.args[0]]
    numbers = {place: i for i, place in enumerate(sorted({*places.values()}))}
    return {node: numbers[place] for node, place in places.items()}


def _graph(
    part: PurePart, nodes: Sequence[fx.Node], takes: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {}
    for node in takes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a constant of an earlier piece
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copied)
    end = graph.output(tuple(copied(node) for node in results))
    end.meta["val"] = tuple(node.meta["val"] for node in results)
    return fx.GraphModule(part.graph, graph)
