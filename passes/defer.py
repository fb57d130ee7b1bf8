"""defer: what makes weight gradients alone gets a phase of its own, after the backward."""

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

    No other node reads them, so nothing else changes. What makes an input's and weights' gradients in one call stays in
    B, and its gradients are handed through: W returns all of them. What another worker reads, whose own W adds it up to
    the gradient of a weight that several workers use, stays in B too, after all that B is for: W is what no worker
    waits for.

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
        found = [n for n in program if info(n).weight]
        awaited = _awaited(found)
        for node in sorted(found, key=lambda n: n not in awaited):  # stable: otherwise in their order
            info(node).phase = "B" if node in awaited else "W"
            end.prepend(node)
        return replace(program, weights_apart=True)


def _awaited(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Those of the nodes that another worker reads, and what they are made of."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        users = [n for n in node.users if n.op == "call_function"]
        if any(info(n).worker != info(node).worker or n in found for n in users):
            found.add(node)
    return found
