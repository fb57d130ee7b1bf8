"""defer: what makes weight gradients alone gets a phase of its own, after the backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxpipe.ir.program import Level, Program, info
from fxpipe.ir.transform import Pass


@dataclass(frozen=True)
class Defer(Pass):
    """Move the nodes that only make weight gradients into the phase W, after all others.

    No other node reads them, so nothing else changes. What makes an input's and weights' gradients in one call stays in
    B, and its gradients are handed through: W returns all of them.

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
        for node in [n for n in program if info(n).weight]:
            info(node).phase = "W"
            end.prepend(node)
        return replace(program, weights_apart=True)
