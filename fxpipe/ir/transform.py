"""What a pass is, and the runner that applies a list of them.

Timing, dumping and verifying are observers of the runner, never code in a pass.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fxpipe.errors import VerifyError
from fxpipe.ir.garbage import rarely_collected
from fxpipe.ir.law import verify
from fxpipe.ir.printer import print_program
from fxpipe.ir.program import Level, Program


@dataclass(frozen=True)
class Pass(ABC):
    """One step from program to program. Its fields are its options; it never changes the program it is given."""

    name: ClassVar[str]
    requires: ClassVar[Level]
    provides: ClassVar[Level]

    @abstractmethod
    def __call__(self, program: Program) -> Program:
        """The new program, at level `provides`."""


Observer = Callable[[int, Pass, Program, float], None]


@rarely_collected()
def run_passes(
    program: Program, passes: Sequence[Pass], observers: Sequence[Observer] = (), dumped_as: str = ""
) -> Program:
    """Apply the passes in order; after each, verify the law of its level and tell the observers.

    Args:
        observers: called as (number, pass, program, seconds) after every pass.
        dumped_as: what the names of dumped files begin with.

    Raises:
        VerifyError: a pass was given a program below the level it requires, or broke the law of the one it provides.
    """
    observers = (*observers, *_dumping(dumped_as))
    verify(program)
    for number, step in enumerate(passes, start=1):
        if program.level < step.requires:
            raise VerifyError(f"pass {step.name} needs a program at {step.requires.name}, not {program.level.name}")
        start = time.perf_counter()
        program = step(program)
        seconds = time.perf_counter() - start
        if program.level < step.provides:
            raise VerifyError(f"pass {step.name} left a program at {program.level.name}, not {step.provides.name}")
        try:
            verify(program)
        except VerifyError as error:
            error.where = f"after pass {step.name}"
            raise
        for observe in observers:
            observe(number, step, program, seconds)
    return program


def _dumping(prefix: str) -> tuple[Observer, ...]:
    """FXPIPE_DUMP=dir writes NN_pass-name.py after every pass."""
    folder = os.environ.get("FXPIPE_DUMP")
    if not folder:
        return ()
    Path(folder).mkdir(parents=True, exist_ok=True)

    def dump(number: int, step: Pass, program: Program, seconds: float) -> None:
        Path(folder, f"{prefix}{number:02}_{step.name}.py").write_text(print_program(program))

    return (dump,)
