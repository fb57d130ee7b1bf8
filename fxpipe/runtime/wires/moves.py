"""Tensors that evaluation reads on a worker that does not have their newest value: they are sent before the batches."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.plan.spec import EdgeSpec, Plan, TensorSpec


@dataclass(frozen=True)
class Move:
    """A tensor that is sent from one worker to another before the batches of an evaluation.

    Attributes:
        once: whether it never changes, and so is sent only before the first evaluation.
    """

    name: str
    spec: TensorSpec
    source: int
    reader: int
    once: bool

    @property
    def edge(self) -> EdgeSpec:
        """The edge by which it is sent."""
        return EdgeSpec(f"evaluate:{self.name}:{self.reader}", "input", self.source, "F", self.reader, "F", self.spec)


def moves(plan: Plan) -> list[Move]:
    """All moves of a plan, in the order in which every worker sends and receives its own."""
    aliases = first_names(plan)
    readers: dict[str, set[int]] = {}
    for spec in plan.evaluations:
        for worker, stage in enumerate(spec.stages):
            for name in (*stage.part.weights, *stage.part.buffers):
                readers.setdefault(aliases[name], set()).add(worker)
    parameters = [(p.name, p.tensor, p.owner, not p.trained) for p in plan.parameters]
    buffers = [(b.name, b.tensor, b.home, False) for b in plan.buffers if b.home is not None]
    return [
        Move(name, spec, source, reader, once)
        for name, spec, source, once in (*parameters, *buffers)
        for reader in sorted(readers.get(name, ()))
        if reader != source
    ]


def evaluation_edges(plan: Plan) -> list[EdgeSpec]:
    """All edges of evaluation, which notes are not: of moved tensors, and of the values for every shape of batch."""
    return [*(move.edge for move in moves(plan)), *(edge for spec in plan.evaluations for edge in spec.edges)]


def first_names(plan: Plan) -> dict[str, str]:
    """The first name of every parameter and buffer by each of its names."""
    rows = [row.names for row in plan.parameters] + [row.names for row in plan.buffers]
    return {name: names[0] for names in rows for name in names}
