"""A stage: what one worker executes, as a graph for each phase, with an explicit interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from fxpipe.ir.wire import is_recv, is_reduce, is_send, is_unpack
from fxpipe.plan.spec import PartSpec, Phase


@dataclass(frozen=True, eq=False)
class Function:
    """What a stage computes several times, as `passes/outline.py` finds it: `def blocks_forward(weights, values)`.

    Attributes:
        name: of the Python function.
        module: of the first call; names and comments inside lack its path.
        serves: the modules for which it is called, in order.
        graph: placeholders for weights, buffers, values and numbers, calls, and the tuple of results.
        weights, buffers, values: how many placeholders are for each; the others are numbers.
    """

    name: str
    module: str
    serves: tuple[str, ...]
    graph: fx.Graph
    weights: int
    buffers: int
    values: int


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """Some calls of a part that are one call of a function in its text.

    Attributes:
        module: for which it is called; `layers.3 into layers.4` if it begins in one and ends in another.
        nodes: the part's calls, one after the other, as the function's graph has them.
        arguments: what the function's placeholders stand for: nodes of the part, and numbers.
        results: the part's nodes that the function returns.
    """

    function: Function
    module: str
    nodes: tuple[fx.Node, ...]
    arguments: tuple[Any, ...]
    results: tuple[fx.Node, ...]

    def grouped(self) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node], list[float]]:
        """The arguments: weights, buffers, values and numbers."""
        f, every = self.function, list(self.arguments)
        ends = f.weights, f.weights + f.buffers, f.weights + f.buffers + f.values
        return every[: ends[0]], every[ends[0] : ends[1]], every[ends[1] : ends[2]], every[ends[2] :]


@dataclass(frozen=True)
class Part:
    """One function of a stage.

    `graph` has a placeholder for every weight, buffer and batch leaf or saved value (in the order of `spec`), ATen
    calls, Send and Recv nodes (`edges` gives the edge's name by node name), and the output tuple: for `forward`
    `(loss or None, updates, saved)`, for `backward` the gradients, or the list of deferred values if `weights` makes
    the gradients; for `evaluate` the metrics, then the updates. `outlined` are calls that its text makes through
    functions of the stage, in order; the graph has them all.
    """

    function: Literal["forward", "backward", "weights", "evaluate"]
    graph: fx.Graph
    spec: PartSpec
    edges: Mapping[str, str]
    outlined: tuple[FunctionCall, ...] = ()

    @property
    def third(self) -> str:
        """The name of the function's third argument."""
        return {"backward": "saved", "weights": "deferred"}.get(self.function, "batch")

    @property
    def passed(self) -> tuple[str, ...]:
        """The names of the values that the previous function left for it."""
        return {"backward": self.spec.saved, "weights": self.spec.deferred}.get(self.function, ())

    def last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """By node, the values that the code drops after it: those with memory that no later call reads.

        Weights and buffers do not belong to the part.
        """
        return last_uses(self.graph, len(self.spec.weights) + len(self.spec.buffers))


def last_uses(graph: fx.Graph, lasting: int) -> dict[fx.Node, list[fx.Node]]:
    """By node, the values that code drops after it: those with memory that no later call reads.

    The first placeholders, so many, last longer than the code.
    """
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not (is_send(node) or is_reduce(node)):
            last[node] = node  # until something reads it
        for source in node.all_input_nodes:
            last[source] = node
    longer = {n for n in list(graph.nodes)[:lasting] if n.op == "placeholder"}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last.items():
        if reader.op != "output" and node not in longer:
            dying.setdefault(reader, []).append(node)
    return dying


@dataclass(frozen=True)
class Stage:
    """The parts of one worker by phase: F, B and perhaps W for a training step, only F for an evaluation.

    `file` is the name of the emitted file and `source` its text, once there is one.
    """

    worker: int
    parts: Mapping[Phase, Part]
    file: str = ""
    source: str = ""

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions that its parts call, in the order of their first calls."""
        return tuple(dict.fromkeys(call.function for part in self.parts.values() for call in part.outlined))


def name_in_part(node: fx.Node) -> str:
    """The name of a program's node in its part: a received value keeps its sender's name."""
    if is_unpack(node):
        return node.name.rpartition("_unpack_")[0]
    if not is_recv(node):
        return node.name
    name = node.name.rpartition("_recv_")[0]
    return f"{name}_packed" if any(is_unpack(user) for user in node.users) else name
