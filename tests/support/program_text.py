"""Programs as text for tests: what fxpipe prints, without the user's lines, which move when a test is edited."""

from __future__ import annotations

import re
from textwrap import dedent

import torch

from fxpipe.ir.printer import print_program
from fxpipe.ir.program import Program
from fxpipe.ir.transform import Pass, run_passes


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


def check_pass(step: Pass, program: Program, before: str, after: str) -> None:
    """The program is `before`, the pass makes it `after`, and both compute the same."""
    assert text(program) == dedent(before).strip()
    made = run_passes(program, [step])
    assert text(made) == dedent(after).strip()
    assert all(torch.equal(a, b) for a, b in zip(program.run(), made.run(), strict=True))
