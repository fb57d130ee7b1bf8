"""What a pass is, and the runner that applies a list of them.

The runner verifies, observers count and dump; none of it is code in a pass.
"""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fxpipe.errors import VerifyError
from fxpipe.ir.law import verify
from fxpipe.ir.printer import print_program
from fxpipe.ir.program import Level, Program

YOUNG = 50_000
"""Objects made before the collector looks at them; Python's own 700 cost a third of the passes' time."""


@dataclass(frozen=True)
class Pass(ABC):
    """One step from program to program. Its fields are its options; it never changes the program it is given.

    Attributes:
        requires: the level of the programs it takes: no lower, since it relies on that level, and no higher, since it
            would invalidate what later levels have added.
        provides: the level of the program it gives.
    """

    name: ClassVar[str]
    requires: ClassVar[Level]
    provides: ClassVar[Level]

    @abstractmethod
    def __call__(self, program: Program) -> Program:
        """The new program, at level `provides`."""


@dataclass(frozen=True)
class Applied:
    """A pass that has run: its number from 1, and the programs before and after it."""

    number: int
    step: Pass
    before: Program
    program: Program


Observer = Callable[[Applied], None]


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Inside, Python's collector of cycles runs rarely, and only over what is made inside; if it is off, it stays off.

    While graphs are built, there are many small objects, few of them garbage, and a million of torch's own.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < YOUNG:  # it is off, or this is inside another one
        yield
        return
    gc.set_threshold(YOUNG, *before[1:])
    gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@rarely_collected()
def run_passes(
    program: Program, passes: Sequence[Pass], observers: Sequence[Observer] = (), dumped_as: str = "", first: int = 1
) -> Program:
    """Apply the passes in order; after each, verify the law of its level and call the observers.

    Args:
        dumped_as: the start of the names of dumped files.
        first: the number of the first pass, if others have run before, which have verified the program.

    Raises:
        VerifyError: a pass would get a program of another level than it requires, which is found before the first one
            runs; or it broke the law of the level it provides.
    """
    check_order(program.level, passes)
    observers = (*observers, *_dumping(dumped_as))
    if first == 1:
        verify(program)
    for number, step in enumerate(passes, start=first):
        before = program
        program = step(before)
        if program.level != step.provides:
            raise VerifyError(f"pass {step.name} left a program at {program.level.name}, not {step.provides.name}")
        try:
            verify(program)
        except VerifyError as error:
            error.where = f"after pass {step.name}"
            raise
        for observe in observers:
            observe(Applied(number, step, before, program))
    return program


def check_order(level: Level, passes: Sequence[Pass]) -> None:
    """Refuse passes that cannot run in this order on a program of that level.

    Raises:
        VerifyError: names the pass, the level of the program that it would get, and what to run first.
    """
    for place, step in enumerate(passes):
        if level != step.requires:
            suitable = [p.name for p in passes if p.provides == step.requires != p.requires]
            raised = [p.name for p in passes[:place] if p.provides > step.requires]
            if level < step.requires:
                hint = f"run {' or '.join(suitable) or f'a pass that provides {step.requires.name}'} first"
            else:
                hint = f"run {step.name} before {raised[0]}" if raised else f"begin with a {step.requires.name} program"
            raise VerifyError(
                f"pass {step.name} takes a program that is {step.requires.name}, but this one is {level.name}",
                hint=hint,
            )
        level = step.provides


@dataclass(frozen=True)
class PassLines:
    """An observer that keeps a line for every pass: `fold  812 → 640 nodes`."""

    lines: list[str] = field(default_factory=list)

    def __call__(self, applied: Applied) -> None:
        before, after = (len(program.graph.nodes) for program in (applied.before, applied.program))
        change = f"{before} → {after}" if before != after else f"{after}"
        self.lines.append(f"{applied.step.name:<18}{change} nodes")


def _dumping(prefix: str) -> tuple[Observer, ...]:
    """FXPIPE_DUMP=dir writes NN_pass-name.py after every pass."""
    folder = os.environ.get("FXPIPE_DUMP")
    if not folder:
        return ()
    Path(folder).mkdir(parents=True, exist_ok=True)

    def dump(applied: Applied) -> None:
        name = f"{prefix}{applied.number:02}_{applied.step.name}.py"
        Path(folder, name).write_text(print_program(applied.program))

    return (dump,)
