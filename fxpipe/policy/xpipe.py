"""The first microbatch of a minibatch predicts weights; the others see the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from fxpipe.plan.spec import Phase
from fxpipe.policy.base import PredictingPolicy
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.versions import Versions


@dataclass(frozen=True)
class XPipe(PredictingPolicy):
    """One prediction for each phase of a minibatch, made by its first microbatch and read by all.

    Worker k of N, M microbatches: s_F = [(N + M − k/2 − 2)/M] updates ahead for a forward, s_B = [(M + ⌊k/2⌋ − 1)/M]
    for a backward, rounded to the nearest integer, halves down; with one microbatch it is SpecTrain. Both count from
    the version that the first microbatch can read in steady state; a weight copy has the same target. Here M = 2:

        worker 0: F0@0     F0.1@0   ..       B0@0     F1@0+1   B0.1@0   F1.1@0+1 B1@1     ..       B1.1@1
        worker 1: ..       F0@0+1   B0@0     F0.1@0+1 B0.1@0   F1@1+1   B1@1     F1.1@1+1 B1.1@1

    If branches of the model run side by side, N is the number of workers on the longest way through them, and k is
    `Schedule.level`.

    On a single worker no weights are stale and nothing is predicted, unless the schedule makes updates late.

    Memory: two predicted copies of the weights, one for each phase in progress.
    From: Guan et al. 2019 (XPipe), arXiv 1911.04610.
    """

    name: ClassVar[str] = "xpipe"

    def lag(self, newest: Versions, phase: Phase, microbatch: int, reader: int, owner: int) -> int:
        return newest.lag(phase, reader, owner)

    def ahead(self, action: Action, version: int, owner: int, schedule: Schedule) -> int:
        workers, microbatches, place = 1 + schedule.depths[0], schedule.microbatches, schedule.level(owner)
        if workers == 1:
            return action.minibatch - version
        if action.phase == "F":
            late = ceil((workers - 1 - place) / microbatches)
            target = action.minibatch - late + _nearest((workers + microbatches - place / 2 - 2) / microbatches)
        else:
            target = action.minibatch + _nearest((microbatches + place // 2 - 1) / microbatches)
        return max(0, target - version)


def _nearest(value: float) -> int:
    """Rounded to the nearest integer, halves down."""
    return ceil(value - 0.5)
