"""Programs as text for tests: what fxpipe prints, without the user's lines, which move when a test is edited."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fxpipe.ir.printer import print_program
from fxpipe.ir.program import Program
from fxpipe.ir.transform import Observer, run_passes
from fxpipe.lowering.lowering import Lowering
from fxpipe.lowering.options import DEFAULTS
from fxpipe.passes.cost import Cost
from fxpipe.passes.cut import Cut
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units
from fxpipe.planner.cuts import Cuts


def placed(program: Program, *forward: int) -> Program:
    """The captured program with a worker for every node: cuts before these units, in both phases."""
    program = run_passes(program, [Fold(), Units(), Cost()])
    positions = (0, *forward, len(program.units))
    return run_passes(program, [Cut(Cuts(positions, positions))])


def emitted(program: Program, cuts: Cuts, observers: Sequence[Observer] = ()) -> Program:
    """The captured program with its files: cut there, with computed costs."""
    step = Lowering(program, DEFAULTS, observers=tuple(observers)).front().through([Cost()])
    return step.wired(cuts).emitted().program


def text(program: Program) -> str:
    """The program as `print_program` has it, with `# F`, `# B` and `# W` alone where the phase changes."""
    lines: list[str] = []
    phase = ""
    for line in print_program(program).splitlines():
        heading = re.match(r"# ([FBW]) ", line)
        if heading is None:
            lines.append(line)
        elif heading[1] != phase:
            phase = heading[1]
            lines.append(f"# {phase}")
    return "\n".join(lines)
