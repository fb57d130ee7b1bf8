"""Forward and backward of a minibatch see weights predicted for the same moment of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpipe.policy.base import PredictingPolicy
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule


@dataclass(frozen=True)
class SpecTrain(PredictingPolicy):
    """Forward and backward of minibatch m see the weights of worker k predicted for version m + ⌊k/2⌋.

    In the paper's notation, worker k of N predicts s_F = ⌊k/2⌋ + N−1−k updates ahead for a forward and s_B = ⌊k/2⌋ for
    a backward: Ŵ = W − s·η·(momentum). Its forward can read version m − (N−1−k) and its backward version m, so both
    have the target above: s = m + ⌊k/2⌋ − version. A weight copy has the same target and its own version.

    `F3@1+2` is the forward of minibatch 3 with the weights after 1 update, predicted 2 updates ahead:

        worker 0: F0@0   F1@0+1 F2@0+2 ..     ..     B0@0   F3@1+2 B1@1   ..     B2@2   ..     B3@3
        worker 1: ..     F0@0   F1@0+1 ..     B0@0   F2@1+1 B1@1   F3@2+1 B2@2   ..     B3@3
        worker 2: ..     ..     F0@0+1 B0@0+1 F1@1+1 B1@1+1 F2@2+1 B2@2+1 F3@3+1 B3@3+1

    The target is the moment one slot before worker 0 begins the minibatch's backward, if a forward takes as long as a
    backward: worker k is then ⌊k/2⌋ minibatches further. With M microbatches it is ⌊k/2⌋ microbatches further, so the
    target of microbatch j is version m + ⌊(j + ⌊k/2⌋)/M⌋. If branches of the model run side by side, k is
    `Schedule.level`.

    Before the first update there is no direction, and nothing is predicted.

    Memory: one predicted copy of the weights at a time; the direction is the optimizer's own (`predict.py`).
    From: Chen, Yang, Cheng 2018 (SpecTrain), arXiv 1809.02839; the extension to microbatches is our own.
    """

    name: ClassVar[str] = "spectrain"

    def ahead(self, action: Action, version: int, owner: int, schedule: Schedule) -> int:
        further = (action.microbatch + schedule.level(owner) // 2) // schedule.microbatches
        return action.minibatch + further - version
