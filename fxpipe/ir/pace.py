"""What keeps workers in step: F of a worker comes after F of the workers before it, B after B of those behind it.

Schedules, versions and transports rely on that order, the graph of the workers, for every microbatch. A value that goes
from one worker to the next on the graph enforces it, but some pairs have none: a worker without a forward, a frozen
first half that no gradient reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxpipe.ir.program import Program
from fxpipe.ir.wire import is_recv
from fxpipe.plan.spec import Phase
from fxpipe.schedule.graph import Graph, behind, chain, graph_of_edges


@dataclass(frozen=True)
class Gap:
    """Workers for which nothing makes `dst` wait for `src`; `src` itself is in step from its node `after` on.

    `after` is None for the worker that begins the phase: it is in step from its start.
    """

    phase: Phase
    src: int
    dst: int
    after: fx.Node | None


def first_gap(program: Program, graph: Graph | None = None) -> Gap | None:
    """The first gap, in the order of its phase, of a wired training step; by default of the graph that edges enforce.

    None for an evaluation: its caller keeps the workers in step.
    """
    assert program.cuts is not None
    if program.phases == ("F",):
        return None
    workers = program.cuts.workers
    if graph is None:
        graph = graph_of_edges(program.wires.values(), workers)
    graph = graph or chain(workers)
    # No worker waits for another's weight gradients.
    return _first_gap(program, "F", graph) or _first_gap(program, "B", behind(graph))


def _first_gap(program: Program, phase: Phase, awaited: Graph) -> Gap | None:
    """The first gap of a phase.

    Only values count that the sender sends once it is in step itself: an earlier value shows that it has begun, not
    that the workers for which it waits have. A worker that begins with the batch is in step when it has it.
    """
    order: dict[fx.Node, int] = {}
    crossing: dict[tuple[int, int], list[fx.Node]] = {}
    for place, node in enumerate(program.graph.nodes):
        order[node] = place
        edge = program.wires.get(node.name)
        if edge is not None and is_recv(node) and edge.src_phase == edge.dst_phase == phase:
            crossing.setdefault((edge.src, edge.dst), []).append(node)
    in_step: dict[int, fx.Node | None] = {}
    for dst in range(len(awaited)) if phase == "F" else reversed(range(len(awaited))):
        first: list[fx.Node] = []
        for src in awaited[dst]:
            after = in_step[src]
            start = -1 if after is None else order[after]
            held = [recv for recv in crossing.get((src, dst), ()) if order[recv.all_input_nodes[0]] > start]
            if not held:
                return Gap(phase, src, dst, after)
            first.append(min(held, key=order.__getitem__))
        batch = () if awaited[dst] else crossing.get((0, dst), ())
        in_step[dst] = max(first, key=order.__getitem__) if first else min(batch, key=order.__getitem__, default=None)
    return None
