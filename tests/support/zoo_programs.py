"""Captured models of the zoo's core, and cuts in three whose forward and backward lie apart."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

from families import CORE
from fxpipe.passes.analysis.profile import glued_positions
from random_cuts import legal_cuts, with_units
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.program import Program
from fxpipe.planner.cuts import Cuts
from fxpipe.task.batch import split

WORKERS, MICROBATCHES = 3, 2
Step = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]


@functools.lru_cache(maxsize=1)  # one at a time: they are large
def captured_core(name: str, size: int | None = None) -> tuple[Step, Program, Program]:
    """A model's step, its program of one microbatch, and that with its units; `size` samples in a minibatch."""
    entry = CORE[name]
    model, loss, batch = dataclasses.replace(entry, size=size or entry.size).make()
    program = fxpipe.capture(model, loss, split(batch, MICROBATCHES)[0])
    return (model, loss, batch), program, with_units(program, MICROBATCHES)


def even_cuts(program: Program) -> Cuts:
    """Thirds of the units in forward; backward's cuts an eighth of the units later."""
    count, glued = len(program.units), glued_positions(program)
    free = [p for p in range(count + 1) if p not in glued]
    at = [min(free, key=lambda p: abs(p - count * k / WORKERS)) for k in range(1, WORKERS)]
    return Cuts((0, *at, count), (0, *(p + count // 8 for p in at), count))


def apart_cuts(program: Program) -> Cuts:
    """The first random ones with weight gradients cut apart, too, and runs computed again."""
    found = (legal_cuts(program, WORKERS, str(seed)) for seed in itertools.count())
    return next(c for c in found if len({c.forward, c.backward, c.weights}) == 3 and c.recompute)
