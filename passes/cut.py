"""cut: give every node its worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpipe.ir.program import Level, Program, info
from fxpipe.ir.transform import Pass
from fxpipe.planner.cuts import Cuts


@dataclass(frozen=True)
class Cut(Pass):
    """Place every node: stage k runs F of the units between its forward cuts, and likewise B and W.

    `fxpipe/lowering/choose_cuts.py` chooses the cuts.
    """

    name: ClassVar[str] = "cut"
    requires: ClassVar[Level] = Level.COSTED
    provides: ClassVar[Level] = Level.PLACED

    cuts: Cuts

    def __call__(self, program: Program) -> Program:
        return placed(program, self.cuts)


def placed(program: Program, cuts: Cuts) -> Program:
    """The program with a worker for each node."""
    assert cuts.forward[-1] == len(program.units)
    program = program.copy(level=Level.PLACED, cuts=cuts)
    for node in program:
        record = info(node)
        record.worker = cuts.worker(record.phase, record.unit, record.weight)
    return program
