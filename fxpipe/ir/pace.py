"""What keeps workers in step: F of a worker comes after F of the previous worker, B after B of the next worker.

Schedules, versions and transports rely on that order for every microbatch. A value that goes from neighbour to
neighbour enforces it, but some pairs have none: a worker without a forward, a frozen first half that no gradient
reaches, a skip connection past a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from fxpipe.ir.program import Program
from fxpipe.ir.wire import is_recv
from fxpipe.plan.spec import Phase


@dataclass(frozen=True)
class Gap:
    """Neighbours for which nothing makes `dst` wait for `src`; `src` itself is in step from its node `after` on.

    `after` is None for the worker that begins the phase: it is in step from its start.
    """

    phase: Phase
    src: int
    dst: int
    after: fx.Node | None


def first_gap(program: Program) -> Gap | None:
    """The first neighbours, in the order of their phase, that a wired training step does not keep in step.

    None for an evaluation: its caller keeps the workers in step.
    """
    if program.phases == ("F",):
        return None
    paced: tuple[Phase, ...] = ("F", "B")  # no worker waits for another's weight gradients
    return next((gap for phase in paced if (gap := _first_gap(program, phase))), None)


def _first_gap(program: Program, phase: Phase) -> Gap | None:
    """The first gap of a phase.

    Only values count that the first worker sends once it is in step itself: an earlier value shows that it has begun,
    not that the workers before it have.
    """
    assert program.cuts is not None
    order: dict[fx.Node, int] = {}
    crossing: dict[tuple[int, int], list[fx.Node]] = {}
    for place, node in enumerate(program.graph.nodes):
        order[node] = place
        edge = program.wires.get(node.name)
        if edge is not None and is_recv(node) and edge.src_phase == edge.dst_phase == phase:
            crossing.setdefault((edge.src, edge.dst), []).append(node)
    workers = range(program.cuts.workers)
    after: fx.Node | None = None
    for src, dst in pairwise(workers if phase == "F" else reversed(workers)):
        start = -1 if after is None else order[after]
        held = [recv for recv in crossing.get((src, dst), ()) if order[recv.all_input_nodes[0]] > start]
        if not held:
            return Gap(phase, src, dst, after)
        after = min(held, key=order.__getitem__)
    return None
