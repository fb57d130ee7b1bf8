"""defer: what makes only weight gradients gets its own phase, after the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from fxpipe.ir.program import Level, Program, info
from fxpipe.ir.transform import Pass


@dataclass(frozen=True)
class Defer(Pass):
    """Move the nodes that only make weight gradients into the phase W, after all others.

    No other node reads them, so nothing else changes. A call that makes both an input's and weights' gradients stays in
    B, and W returns its weight gradients unchanged. What another worker reads stays in B too, after everything else in
    B: it is added up there to the gradient of a weight that several workers use, and no worker may wait for W.

    Before:  dx = mm(dy, w)  # B                After:  dx = mm(dy, w)  # B
             dw = mm(t(dy), x)  # B, weight             dv = …
             dv = …                                     dw = mm(t(dy), x)  # W, weight
    """

    name: ClassVar[str] = "defer"
    requires: ClassVar[Level] = Level.PLACED
    provides: ClassVar[Level] = Level.PLACED

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        end = program.graph.output_node()
        weights = [n for n in program if info(n).weight]
        awaited = _awaited(weights)
        for node in sorted(weights, key=lambda n: n not in awaited):  # stable: the others keep their order
            info(node).phase = "B" if node in awaited else "W"
            end.prepend(node)
        return replace(program, weights_apart=True)


def _awaited(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that another worker reads, and what they are made from."""
    awaited: set[fx.Node] = set()
    for node in reversed(nodes):
        users = [n for n in node.users if n.op == "call_function"]
        if any(info(n).worker != info(node).worker or n in awaited for n in users):
            awaited.add(node)
    return awaited
