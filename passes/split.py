"""split: a graph for each phase of each worker, with an explicit interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import fx

from fxpipe.ir import wire
from fxpipe.ir.aten import is_random
from fxpipe.ir.program import Level, Program, home_of, info
from fxpipe.ir.stage import Part, Stage, name_in_part
from fxpipe.ir.transform import Pass
from fxpipe.plan.spec import FUNCTIONS, PartSpec, Phase


@dataclass(frozen=True)
class Split(Pass):
    """Give the program its stages; the graph itself stays unchanged.

    A stage's forward takes weights, buffers and (on worker 0) the batch; it returns the loss (one tensor with its
    metrics, if it has some), the buffers' new values and the saved values. Its backward takes weights, buffers and the
    saved values, and returns gradients. If weight gradients are separate, it returns the deferred values from which
    they are made, and a third function takes weights, buffers and these, and returns gradients. A stage of an
    evaluation has one part, which takes the arguments of forward, and returns metrics, then the new values of the
    buffers that it carries from batch to batch.

    Before:  y = mm(h, w2)  # F w0           After:  stage 0 forward   (h, w2): y = mm(h, w2); send(y)
             y_send_1 = send(y)  # F w0              stage 1 forward   (): y = recv()
             y_recv_1 = recv(y_send_1)  # F w1       …
    """

    name: ClassVar[str] = "split"
    requires: ClassVar[Level] = Level.WIRED
    provides: ClassVar[Level] = Level.SPLIT

    def __call__(self, program: Program) -> Program:
        return replace(program, level=self.provides, stages=tuple(stages_of(program)))


def stages_of(program: Program) -> list[Stage]:
    """What each worker of a wired program executes."""
    assert program.cuts is not None
    calls: dict[tuple[int, Phase], list[fx.Node]] = {}
    for node in program:
        worker = info(node).worker
        assert worker is not None
        calls.setdefault((worker, info(node).phase), []).append(node)
    interface = _Interface(program)
    stages = []
    for worker in range(program.cuts.workers):
        mine = {phase: calls.get((worker, phase), []) for phase in program.phases}
        handed = interface.handed(worker, mine)
        parts = {phase: interface.part(worker, phase, mine[phase], *handed[phase]) for phase in mine}
        stages.append(Stage(worker, parts))
    return stages


class _Interface:
    """The program's tables by node: what a part takes and returns."""

    def __init__(self, program: Program) -> None:
        self.placeholders = program.placeholders
        self.last = program.phases[-1]
        self.wires = program.wires
        self.parameters = {p.node: p.names[0] for p in program.parameters}
        self.buffers = {b.node: b.names[0] for b in program.buffers}
        self.batch = {b.node: b.leaf.name for b in program.batch if b.node}
        self.updates = program.updates()
        self.gradients = program.gradients()
        self.metrics = program.metrics()
        self.loss = program.loss_node
        self.loss_metrics = program.loss_metrics

    def handed(
        self, worker: int, calls: Mapping[Phase, list[fx.Node]]
    ) -> dict[Phase, tuple[list[fx.Node], list[fx.Node]]]:
        """By phase, what a worker's part takes from the part before it, and what it leaves for the next one."""
        by_phase: dict[Phase, tuple[list[fx.Node], list[fx.Node]]] = {}
        phases = list(calls)
        taken: list[fx.Node] = []
        for i, phase in enumerate(phases, 1):
            before, after = (dict.fromkeys(n for p in some for n in calls[p]) for some in (phases[:i], phases[i:]))
            left = self._left(worker, before, after) if i < len(phases) else []
            by_phase[phase] = taken, left
            taken = left
        return by_phase

    def _left(self, worker: int, before: Iterable[fx.Node], after: Mapping[fx.Node, None]) -> list[fx.Node]:
        """The existing values that a worker's later calls read, in the order in which they are made."""
        read = dict.fromkeys(n for node in after if not wire.is_recv(node) for n in node.all_input_nodes)
        read.update(dict.fromkeys(n for n in self.gradients.values() if home_of(n) == worker))
        # Each function takes parameters, and buffers without updates, as weights and buffers.
        local = self.parameters.keys() | (self.buffers.keys() - self.updates.keys())
        left = [n for n in read if n not in after and n.name not in local]
        order = {n: i for i, n in enumerate(before)}
        return sorted(left, key=lambda n: order.get(n, -1))

    def part(self, worker: int, phase: Phase, calls: list[fx.Node], passed: list[fx.Node], left: list[fx.Node]) -> Part:
        """One phase of a worker: its calls as a graph, with its inputs and outputs."""

        def made_here(outputs: Mapping[str, fx.Node], made_in: Phase) -> dict[str, fx.Node]:
            return {name: n for name, n in outputs.items() if phase == made_in and home_of(n) == worker}

        updates, metrics = made_here(self.updates, "F"), made_here(self.metrics, "F")
        gradients = made_here(self.gradients, self.last)
        loss = self.loss if phase == "F" and self.loss is not None and home_of(self.loss) == worker else None

        read = {n for node in calls if not wire.is_recv(node) for n in node.all_input_nodes}
        read.update(left, updates.values(), metrics.values(), gradients.values())
        taken = [n for n in self.placeholders.values() if n in read]
        weights = [n for n in taken if n.name in self.parameters]
        buffers = [n for n in taken if n.name in self.buffers and n not in passed]
        batch = [n for n in taken if n.name in self.batch and n not in passed]

        graph, mapped, edges = self._graph([*weights, *buffers, *batch, *passed], calls)
        function: Literal["forward", "backward", "weights", "evaluate"] = FUNCTIONS[phase]
        if phase == self.last != "F":
            graph.output(tuple(mapped[n] for n in gradients.values()))
        elif phase == "B":
            graph.output([mapped[n] for n in left])
        elif self.metrics:
            function = "evaluate"
            graph.output(tuple(mapped[n] for n in (*metrics.values(), *updates.values())))
        else:
            new, remembered = (tuple(mapped[n] for n in nodes) for nodes in (updates.values(), left))
            graph.output((mapped[loss] if loss else None, new, remembered))
        spec = PartSpec(
            weights=tuple(self.parameters[n.name] for n in weights),
            buffers=tuple(self.buffers[n.name] for n in buffers),
            batch=tuple(self.batch[n.name] for n in batch),
            receives=tuple(edges[mapped[n].name] for n in calls if wire.is_recv(n)),
            sends=tuple(edges[mapped[n].name] for n in calls if wire.is_send(n)),
            saved=tuple(name_in_part(n) for n in {"F": left, "B": passed}.get(phase, ())),
            deferred=tuple(name_in_part(n) for n in {"B": left, "W": passed}.get(phase, ())),
            updates=tuple(self.buffers[name] for name in updates),
            gradients=tuple(self.parameters[name] for name in gradients),
            loss=loss is not None,
            random=any(is_random(n) for n in calls),
            metrics=self.loss_metrics if loss is not None else tuple(metrics),
            reduces=tuple(wire.bucket_of(n) for n in calls if wire.is_reduce(n)),
        )
        return Part(function, graph, spec, edges)

    def _graph(
        self, inputs: list[fx.Node], calls: list[fx.Node]
    ) -> tuple[fx.Graph, dict[fx.Node, fx.Node], dict[str, str]]:
        """The calls with a placeholder for each input, without an output; the new nodes by the program's; the edges."""
        graph = fx.Graph()
        mapped: dict[fx.Node, fx.Node] = {}
        edges: dict[str, str] = {}
        for node in inputs:
            # Set the name directly: `graph.placeholder` would write LayerNorm as layer_norm, unlike forward.
            name = name_in_part(node)
            mapped[node] = graph.create_node("placeholder", name, (), {}, name=name)
            mapped[node].meta = dict(node.meta)
        for node in calls:
            if wire.is_recv(node):
                mapped[node] = graph.create_node("call_function", wire.recv, (), {}, name=name_in_part(node))
            elif wire.is_unpack(node):
                packed, *how = node.args
                args = (mapped[packed], *how)  # type: ignore[index]
                mapped[node] = graph.create_node("call_function", wire.unpack, args, {}, name=name_in_part(node))
            else:
                mapped[node] = graph.node_copy(node, lambda n: mapped[n])
            mapped[node].meta = dict(node.meta)
            if node.name in self.wires:
                edges[mapped[node].name] = self.wires[node.name].name
        return graph, mapped, edges
