"""A stage: what one worker executes, as a graph for each phase, with an explicit interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from fxpipe.ir.wire import is_recv, is_reduce, is_send, is_unpack
from fxpipe.plan.spec import PartSpec, Phase


@dataclass(frozen=True)
class Part:
    """One function of a stage.

    `graph` has a placeholder for every weight, buffer and batch leaf or saved value (in the order of `spec`), ATen
    calls, Send and Recv nodes (`edges` gives the edge's name by node name), and the output tuple: for `forward`
    `(loss or None, updates, saved)`, for `backward` the gradients, or the list of deferred values if `weights` makes
    the gradients; for `evaluate` the metrics, then the updates.
    """

    function: Literal["forward", "backward", "weights", "evaluate"]
    graph: fx.Graph
    spec: PartSpec
    edges: Mapping[str, str]

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
        last: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and not (is_send(node) or is_reduce(node)):
                last[node] = node  # until something reads it
            for source in node.all_input_nodes:
                last[source] = node
        held = len(self.spec.weights) + len(self.spec.buffers)
        lasting = {n for n in list(self.graph.nodes)[:held] if n.op == "placeholder"}
        dying: dict[fx.Node, list[fx.Node]] = {}
        for node, reader in last.items():
            if reader.op != "output" and node not in lasting:
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


def name_in_part(node: fx.Node) -> str:
    """The name of a program's node in its part: a received value keeps its sender's name."""
    if is_unpack(node):
        return node.name.rpartition("_unpack_")[0]
    if not is_recv(node):
        return node.name
    name = node.name.rpartition("_recv_")[0]
    return f"{name}_packed" if any(is_unpack(user) for user in node.users) else name
