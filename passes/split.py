"""split: one F graph and one B graph per worker, with an explicit interface; of an evaluation, one graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from fxpipe.ir import wire
from fxpipe.ir.aten import is_random
from fxpipe.ir.program import INFO, Level, Program, info
from fxpipe.ir.stage import Part, Stage
from fxpipe.ir.transform import Pass
from fxpipe.plan.spec import PartSpec, Phase


@dataclass(frozen=True)
class Split(Pass):
    """Give the program its stages; the graph itself stays as it is.

    A stage's forward takes weights, buffers and (on worker 0) the batch; it returns the loss, the buffers' new values
    and the saved values. Its backward takes weights, buffers and the saved values, and returns gradients. A worker's
    share of an evaluation takes what forward takes, and returns metrics.
    """

    name: ClassVar[str] = "split"
    requires: ClassVar[Level] = Level.WIRED
    provides: ClassVar[Level] = Level.WIRED

    def __call__(self, program: Program) -> Program:
        assert program.cuts is not None
        calls: dict[tuple[int, Phase], list[fx.Node]] = {}
        for node in program:
            worker = info(node).worker
            assert worker is not None
            calls.setdefault((worker, info(node).phase), []).append(node)
        tables = _Tables(program)
        if program.evaluates:
            every = range(program.cuts.workers)
            return replace(
                program, shares=tuple(_part(program, tables, k, "F", calls.get((k, "F"), []), []) for k in every)
            )
        stages = []
        for worker in range(program.cuts.workers):
            forward, backward = calls.get((worker, "F"), []), calls.get((worker, "B"), [])
            saved = tables.saved(worker, forward, backward)
            stages.append(
                Stage(
                    worker,
                    _part(program, tables, worker, "F", forward, saved),
                    _part(program, tables, worker, "B", backward, saved),
                )
            )
        return replace(program, stages=tuple(stages))


class _Tables:
    """The program's tables by node."""

    def __init__(self, program: Program) -> None:
        self.parameters = {p.node: p.names[0] for p in program.parameters}
        self.buffers = {b.node: b.names[0] for b in program.buffers}
        self.batch = {b.node: b.leaf.name for b in program.batch if b.node}
        self.updates = program.updates()
        self.gradients = program.gradients()
        self.metrics = program.metrics()
        self.loss = None if program.evaluates else program.loss_node

    def home(self, node: fx.Node) -> int:
        """The worker where an output is made."""
        return (info(node).worker or 0) if node.op == "call_function" else 0

    def saved(self, worker: int, forward: list[fx.Node], backward: list[fx.Node]) -> list[fx.Node]:
        """What this worker's backward keeps from its forward, in the order in which it exists."""
        mine = set(backward)
        wanted = dict.fromkeys(n for node in backward if not wire.is_recv(node) for n in node.all_input_nodes)
        wanted.update(dict.fromkeys(n for n in self.gradients.values() if self.home(n) == worker))
        kept = [n for n in wanted if n not in mine and not self.is_local(n)]
        order = {n: i for i, n in enumerate(forward)}
        return sorted(kept, key=lambda n: order.get(n, -1))

    def is_local(self, node: fx.Node) -> bool:
        """Whether each function takes it as a weight or a buffer: parameters, and buffers that nobody updates."""
        return node.name in self.parameters or (node.name in self.buffers and node.name not in self.updates)


def _part(
    program: Program, tables: _Tables, worker: int, phase: Phase, calls: list[fx.Node], saved: list[fx.Node]
) -> Part:
    read = dict.fromkeys(n for node in calls if not wire.is_recv(node) for n in node.all_input_nodes)
    if phase == "F":
        read.update(dict.fromkeys(saved))
        updates = [(name, n) for name, n in tables.updates.items() if tables.home(n) == worker]
        gradients = []
        metrics = [(name, n) for name, n in tables.metrics.items() if tables.home(n) == worker]
        loss = tables.loss if tables.loss is not None and tables.home(tables.loss) == worker else None
    else:
        updates, metrics, loss = [], [], None
        gradients = [(name, n) for name, n in tables.gradients.items() if tables.home(n) == worker]
    results = [n for _, n in (*updates, *metrics, *gradients)]
    read.update(dict.fromkeys(results))
    order = list(program.placeholders)
    names = {n.name for n in read if n.op == "placeholder"}
    passed = {n.name for n in saved} if phase == "B" else set()
    weights = [n for n in order if n in names and n in tables.parameters]
    buffers = [n for n in order if n in names and n in tables.buffers and n not in passed]
    batch = [n for n in order if n in names and n in tables.batch and n not in passed]

    graph = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    placeholders = program.placeholders
    inputs: Iterable[fx.Node] = [placeholders[n] for n in (*weights, *buffers, *batch)]
    for node in (*inputs, *(saved if phase == "B" else [])):
        # Named outright: `graph.placeholder` would write LayerNorm as layer_norm, and forward's name is another then.
        mapped[node] = graph.create_node("placeholder", _name(node), (), {}, name=_name(node))
        mapped[node].meta = dict(node.meta)
    edges: dict[str, str] = {}
    for node in calls:
        if wire.is_recv(node):
            mapped[node] = graph.create_node("call_function", wire.recv, (), {}, name=_name(node))
        else:
            mapped[node] = graph.node_copy(node, lambda n: mapped[n])
        mapped[node].meta = dict(node.meta)
        if node.name in program.wires:
            edges[mapped[node].name] = program.wires[node.name].name
    if program.evaluates:
        graph.output(tuple(mapped[n] for _, n in metrics))
    elif phase == "F":
        graph.output(
            (
                mapped[loss] if loss else None,
                tuple(mapped[n] for _, n in updates),
                tuple(mapped[n] for n in saved),
            )
        )
    else:
        graph.output(tuple(mapped[n] for _, n in gradients))
    spec = PartSpec(
        weights=tuple(tables.parameters[n] for n in weights),
        buffers=tuple(tables.buffers[n] for n in buffers),
        batch=tuple(tables.batch[n] for n in batch),
        receives=tuple(edges[mapped[n].name] for n in calls if wire.is_recv(n)),
        sends=tuple(edges[mapped[n].name] for n in calls if wire.is_send(n)),
        saved=tuple(_name(n) for n in saved),
        updates=tuple(tables.buffers[name] for name, _ in updates),
        gradients=tuple(tables.parameters[name] for name, _ in gradients),
        loss=loss is not None,
        random=any(is_random(n) for n in calls),
        metrics=tuple(name for name, _ in metrics),
    )
    return Part(graph, spec, edges)


def _name(node: fx.Node) -> str:
    """A received value keeps its sender's name: in its stage it is that value."""
    if INFO in node.meta and wire.is_recv(node):
        return node.name.rpartition("_recv_")[0]
    return node.name
