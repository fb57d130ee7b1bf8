"""Random cuts that are legal for a program: independent F, B and W, empty parts, recomputed runs."""

from __future__ import annotations

import functools
import random

from cached import captured

from fxpipe.ir.program import Program
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.options import CompileOptions
from fxpipe.passes import front_passes
from fxpipe.passes.analysis.profile import glued_positions
from fxpipe.planner.cuts import Cuts


@functools.cache
def numbered(name: str) -> Program:
    """A case's program with its units."""
    return with_units(captured(name)[2])


def with_units(program: Program, microbatches: int = 1) -> Program:
    """A captured program with the units that `fxpipe.lower` gives it."""
    options = CompileOptions(microbatches=microbatches, accept_microbatch_loss=True)
    return run_passes(program, front_passes(whole_loss=options.whole_loss()))


def random_cuts(name: str, workers: int, seed: int) -> Cuts:
    """Legal cuts of a case."""
    return legal_cuts(numbered(name), workers, f"{name}/{workers}/{seed}")


def legal_cuts(program: Program, workers: int, seed: str) -> Cuts:
    """Cuts of a program with units; a worker may have an empty forward, an empty backward, or nothing at all."""
    chance = random.Random(seed)
    count, glued = len(program.units), glued_positions(program)
    free = [p for p in range(count + 1) if p not in glued]
    forward = sorted(chance.choice(free) for _ in range(workers - 1))
    backward = sorted(chance.randrange(count + 1) for _ in range(workers - 1))
    weights: list[int] = []
    for position in backward:
        least = max([position, *weights[-1:]])
        weights.append(chance.choice([least, chance.randint(least, count)]))
    cuts = Cuts((0, *forward, count), (0, *backward, count), (0, *weights, count))
    return Cuts(cuts.forward, cuts.backward, cuts.weights, tuple(_recomputed(cuts, chance)))


def _recomputed(cuts: Cuts, chance: random.Random) -> list[tuple[int, int, int]]:
    """Some of the runs whose B or W lies on another worker than their F."""
    found = []
    for worker in range(cuts.workers):
        first, end = cuts.backward[worker], max(cuts.backward[worker + 1], cuts.weights[worker + 1])
        for a, b in ((first, min(end, cuts.forward[worker])), (max(first, cuts.forward[worker + 1]), end)):
            if a < b and chance.random() < 0.6:
                found.append((worker, a, b))
    return found
