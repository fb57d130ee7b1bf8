"""order_evaluation: calls that read a worker's weights come after calls that read weights of earlier workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe.ir.program import Level, Program
from fxpipe.ir.transform import Pass


@dataclass(frozen=True)
class OrderEvaluation(Pass):
    """Put the calls of an evaluation in the order of the workers, which cuts can then follow.

    A call belongs to the first worker that has everything it needs: not before its inputs, nor before the owners of the
    weights it reads, or of the buffers if it reads no weights. What is made only from the batch belongs to its first
    reader. Within a worker the order is kept.

    `owners` are the workers that hold parameters and updated buffers, by first name; every worker has the others.

    Before (the model is called on both images):     After:
        h = mm(left, w0)                                 h = mm(left, w0)
        y = mm(h, w1)                                    g = mm(right, w0)
        g = mm(right, w0)                                y = mm(h, w1)
        z = mm(g, w1)                                    z = mm(g, w1)
    """

    name: ClassVar[str] = "order_evaluation"
    requires: ClassVar[Level] = Level.FOLDED
    provides: ClassVar[Level] = Level.FOLDED

    owners: Mapping[str, int]

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        workers = workers_of(program, self.owners)
        output = program.graph.output_node()
        for node in sorted(program, key=workers.__getitem__):
            output.prepend(node)
        return program


def workers_of(program: Program, owners: Mapping[str, int]) -> dict[fx.Node, int]:
    """The first worker that has all inputs of a call of an evaluation; for its own inputs, parameters decide."""
    placeholders, held = program.placeholders, []
    for rows in (program.parameters, program.buffers):
        held.append({placeholders[r.node]: owners[r.names[0]] for r in rows if r.names[0] in owners})
    workers: dict[fx.Node, int] = {}
    for node in program:
        read = next((homes for owned in held if (homes := [owned[n] for n in node.all_input_nodes if n in owned])), [])
        inputs = [workers[n] for n in node.all_input_nodes if n in workers]
        if inputs or read:
            workers[node] = max(inputs + read)
    for node in reversed(list(program)):
        if node not in workers:
            workers[node] = min((workers[n] for n in node.users if n.op == "call_function"), default=0)
    return workers
