"""place_evaluation: every worker computes the part of an evaluation that uses its weights."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from fxpipe.ir.program import Level, Program, info
from fxpipe.ir.transform import Pass
from fxpipe.passes.cut import placed
from fxpipe.passes.order_evaluation import workers_of
from fxpipe.planner.cuts import Cuts


@dataclass(frozen=True)
class PlaceEvaluation(Pass):
    """Give the units of an evaluation, in order, to the workers in the order of `order_evaluation`.

    A worker receives what it reads and another worker holds: tied weights, and statistics of a batch norm whose weights
    are elsewhere.

    `owners` are as in `order_evaluation`.

    Before:                                      After (head.weight is embed.weight, which worker 0 owns):
        x = embedding(embed_weight, ids)  # u0       x = embedding(embed_weight, ids)  # w0
        y = mm(x, hidden_weight)  # u1               y = mm(x, hidden_weight)  # w1
        z = mm(y, embed_weight_t)  # u2              z = mm(y, embed_weight_t)  # w1: embed_weight is sent
    """

    name: ClassVar[str] = "place_evaluation"
    requires: ClassVar[Level] = Level.COSTED
    provides: ClassVar[Level] = Level.PLACED

    workers: int
    owners: Mapping[str, int]

    def __call__(self, program: Program) -> Program:
        workers = [0] * len(program.units)
        for node, worker in workers_of(program, self.owners).items():
            workers[info(node).unit] = max(workers[info(node).unit], worker)
        latest = list(accumulate(workers, max))
        positions = (*(bisect_left(latest, worker) for worker in range(self.workers)), len(workers))
        return placed(program, Cuts(positions, positions))
