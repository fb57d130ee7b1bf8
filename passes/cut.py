"""cut: choose where forward and backward are cut, and give every node its worker."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fxpipe.passes.balance import balanced

from fxpipe.errors import CutError, near
from fxpipe.program import Cuts, Level, Program, info, size_of, value
from fxpipe.transform import Pass


@dataclass(frozen=True)
class Cut(Pass):
    """Place every node: stage k runs F of the units between its forward cuts, B of those between its backward cuts.

    Fields:
        workers: number of stages.
        forward_at, backward_at: module paths to cut before, one for each boundary between workers. One of them alone
            serves both; without any, one set of cuts for both that balances F + B.

    Raises:
        CutError: more workers than units, an unknown path, cuts out of order, or one that would part the readers of
            a buffer from the unit that updates it.
    """

    name: ClassVar[str] = "cut"
    requires: ClassVar[Level] = Level.COSTED
    provides: ClassVar[Level] = Level.PLACED

    workers: int = 2
    forward_at: tuple[str, ...] = ()
    backward_at: tuple[str, ...] = ()

    def __call__(self, program: Program) -> Program:
        cuts = self._cuts(program)
        program = program.copy(level=Level.PLACED, cuts=cuts)
        for node in program:
            record = info(node)
            bounds = cuts.forward if record.phase == "F" else cuts.backward
            record.worker = bisect_right(bounds, record.unit) - 1
            if record.worker == cuts.workers:
                record.worker -= 1
        return program

    def _cuts(self, program: Program) -> Cuts:
        count = len(program.units)
        if self.workers > count:
            raise CutError(
                f"{self.workers} workers, but the step has only {count} units to share",
                hint=f"use -n {count} or fewer",
            )
        glued = glued_positions(program)
        if not (self.forward_at or self.backward_at):
            inner = balanced(unit_seconds(program), crossing_bytes(program), self.workers, set(glued))
            if inner is None:
                raise CutError(
                    f"no {self.workers} stages are possible: buffers that are updated hold too many units together",
                    hint="use fewer workers",
                )
            return Cuts((0, *inner, count), (0, *inner, count))
        asked = (("--fp-cut", self.forward_at), ("--bp-cut", self.backward_at))
        pinned = [self._pinned(program, paths, option) for option, paths in asked if paths]
        forward, backward = pinned[0], pinned[-1]
        for position in forward:
            if position in glued:
                raise CutError(
                    f"the forward cut before unit {position} ({program.units[position]}) parts the readers of buffer "
                    f"{glued[position]} from the unit that updates it",
                    hint="move the cut before or behind all modules that use this buffer",
                )
        return Cuts((0, *forward, count), (0, *backward, count))

    def _pinned(self, program: Program, paths: Sequence[str], option: str) -> list[int]:
        if len(paths) != self.workers - 1:
            raise CutError(
                f"{self.workers} workers need {self.workers - 1} cuts, {option} gives {len(paths)}",
                hint=f"repeat {option} once for each boundary between workers",
            )
        positions = [self._position(program, path, option) for path in paths]
        for i, (before, after) in enumerate(zip([0, *positions], positions, strict=False)):
            if after <= before:
                previous = paths[i - 1] if i else "the first unit"
                raise CutError(
                    f"{option} {paths[i]} does not come after {previous}: worker {i} would have nothing to do",
                    hint="give the cuts in the order in which the model runs its modules",
                )
        return positions

    def _position(self, program: Program, path: str, option: str) -> int:
        for i, unit in enumerate(program.units):
            if unit == path or unit.startswith(path + "."):
                return i
        known = sorted({".".join(u.split(".")[: d + 1]) for u in program.units for d in range(u.count(".") + 1)} - {""})
        raise CutError(
            f"{option} {path}: no module of that path runs in the forward pass{near(path, known)}",
            hint="paths are those of model.named_modules(); `fxpipe compile` prints where each worker begins",
        )


def unit_seconds(program: Program) -> list[float]:
    """F + B seconds of every unit."""
    total = [0.0] * len(program.units)
    for node in program:
        total[info(node).unit] += info(node).seconds or 0.0
    return total


def crossing_bytes(program: Program) -> list[int]:
    """For every position (a cut before that unit): bytes of the activations that would cross it."""
    steps = [0] * (len(program.units) + 1)
    for node in program:
        if info(node).phase != "F":
            continue
        last = max((info(n).unit for n in node.users if n.op == "call_function" and info(n).phase == "F"), default=-1)
        if last > info(node).unit:
            size = size_of(value(node))
            steps[info(node).unit + 1] += size
            steps[last + 1] -= size
    crossing, running = [], 0
    for step in steps[:-1]:
        running += step
        crossing.append(running)
    return crossing


def glued_positions(program: Program) -> dict[int, str]:
    """Positions where forward must not be cut, each with the updated buffer that forbids it."""
    glued: dict[int, str] = {}
    placeholders = program.placeholders
    for name, new in program.updates().items():
        readers = [n for n in placeholders[name].users if n.op == "call_function" and info(n).phase == "F"]
        units = [info(n).unit for n in readers]
        if new.op == "call_function":
            units.append(info(new).unit)
        for position in range(min(units, default=0) + 1, max(units, default=0) + 1):
            glued.setdefault(position, name)
    return glued
