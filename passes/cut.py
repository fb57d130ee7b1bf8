"""cut: choose where forward and backward are cut, and give every node its worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fxpipe.passes.analysis.profile import glued_positions, profile_of

from fxpipe.errors import CutError, near
from fxpipe.ir.program import Level, Program, info
from fxpipe.ir.transform import Pass
from fxpipe.planner.advice import advised_partitions
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import Profile
from fxpipe.planner.setting import Setting

WORTH = 0.02
"""How much faster distinct forward and backward cuts must be than shared ones to be worth their messages."""


@dataclass(frozen=True)
class Cut(Pass):
    """Place every node: stage k runs F of the units between its forward cuts, and so B and W (`Cuts`).

    Fields:
        workers: number of stages.
        forward_at, backward_at: module paths to cut before, one for each boundary between workers. One of them alone
            serves both; without any, the planner chooses. Where both are given, a path may be repeated: a worker
            between two cuts at one place has nothing to do in that phase.
        cuts: the cuts themselves, instead of all choosing; they may leave a worker without anything to do.
        mode: what the planner may choose: 'same', 'bidirectional', 'three-way', or 'auto': bidirectional where it is
            more than 2% faster than same.
        setting: what it plans for.
        update_seconds_per_byte: of the optimizer, for each byte of weights.

    Raises:
        TooLittleMemory: nothing fits; says what would.
        CutError: more workers than units, an unknown path, cuts out of order, or one that would part the readers of
            a buffer from the unit that updates it; `cuts` for another number of workers or units.
    """

    name: ClassVar[str] = "cut"
    requires: ClassVar[Level] = Level.COSTED
    provides: ClassVar[Level] = Level.PLACED

    workers: int = 2
    forward_at: tuple[str, ...] = ()
    backward_at: tuple[str, ...] = ()
    cuts: Cuts | None = None
    mode: str = "auto"
    setting: Setting = field(default_factory=Setting)
    update_seconds_per_byte: float = 0.0

    def __call__(self, program: Program) -> Program:
        partitions: tuple[Partition, ...] = ()
        profile = profile_of(program, self.update_seconds_per_byte)
        if self.cuts is not None:
            cuts = self._given(program, self.cuts)
        elif self.forward_at or self.backward_at:
            cuts = self._pins(program)
        else:
            partitions = self._planned(profile)
            best = partitions[-1]
            cuts = Cuts(best.forward, best.backward, best.weights, best.recompute)
        program = program.copy(level=Level.PLACED, cuts=cuts, profile=profile, partitions=partitions)
        for node in program:
            record = info(node)
            record.worker = cuts.worker(record.phase, record.unit, record.weight)
        return program

    def _given(self, program: Program, cuts: Cuts) -> Cuts:
        count = len(program.units)
        if (cuts.workers, cuts.forward[-1]) != (self.workers, count):
            raise CutError(
                f"the cuts are for {cuts.workers} workers and {cuts.forward[-1]} units, the step for {self.workers} "
                f"and {count}"
            )
        refuse_glued(program, cuts.forward)
        return cuts

    def _planned(self, profile: Profile) -> tuple[Partition, ...]:
        """The partitions that were compared, the chosen one last."""
        if self.workers > len(profile.units):
            raise CutError(
                f"{self.workers} workers, but the step has only {len(profile.units)} units to share",
                hint=f"use -n {len(profile.units)} or fewer",
            )
        widest = "bidirectional" if self.mode == "auto" else self.mode
        found = advised_partitions(profile, self.setting, self.workers, ("same", widest))
        chosen = found[widest]
        if self.mode == "auto" and "same" in found:
            gains = chosen.bottleneck_ms < found["same"].bottleneck_ms * (1 - WORTH)
            chosen = chosen if gains else found["same"]
        return (*(p for p in found.values() if p is not chosen), chosen)

    def _pins(self, program: Program) -> Cuts:
        count = len(program.units)
        asked = (("--fp-cut", self.forward_at), ("--bp-cut", self.backward_at))
        pinned = [self._pinned(program, paths, option) for option, paths in asked if paths]
        forward, backward = pinned[0], pinned[-1]
        refuse_glued(program, forward)
        return Cuts((0, *forward, count), (0, *backward, count))

    def _pinned(self, program: Program, paths: Sequence[str], option: str) -> list[int]:
        if len(paths) != self.workers - 1:
            raise CutError(
                f"{self.workers} workers need {self.workers - 1} cuts, {option} gives {len(paths)}",
                hint=f"repeat {option} once for each boundary between workers",
            )
        positions = [self._position(program, path, option) for path in paths]
        alone = not (self.forward_at and self.backward_at)  # these cuts are those of both phases
        for i, (before, after) in enumerate(zip([0, *positions], positions, strict=False)):
            if after < before or (alone and after == before):
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


def refuse_glued(program: Program, forward: Iterable[int]) -> None:
    """Raise CutError if a forward cut is where there may be none."""
    glued = glued_positions(program)
    for position in forward:
        if position in glued:
            raise CutError(
                f"the forward cut before unit {position} ({program.units[position]}) parts the readers of buffer "
                f"{glued[position]} from the unit that updates it",
                hint="move the cut before or behind all modules that use this buffer",
            )
