"""Programs as text for tests: what fxpipe prints, without the user's lines, which move when a test is edited."""

from __future__ import annotations

import re

from fxpipe.passes.cost import Cost
from fxpipe.passes.cut import Cut
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units

from fxpipe.ir.printer import print_program
from fxpipe.ir.program import Program
from fxpipe.ir.transform import run_passes
from fxpipe.planner.cuts import Cuts


def placed(program: Program, *forward: int) -> Program:
    """The captured program with a worker for every node: cuts before these units, in both phases."""
    program = run_passes(program, [Fold(), Units(), Cost()])
    positions = (0, *forward, len(program.units))
    return run_passes(program, [Cut(Cuts(positions, positions))])


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
