"""Every pass sees weights predicted for one common moment of its minibatch."""

from __future__ import annotations

from typing import ClassVar

from fxpipe.errors import PolicyError
from fxpipe.plan import Phase
from fxpipe.policy.base import Policy
from fxpipe.schedule.base import Schedule


class SpecTrain(Policy):
    """Both passes of minibatch m see the weights of worker k predicted for version m + ⌊k/2⌋.

    In the paper's words, worker k of N predicts s_F = ⌊k/2⌋ + N−1−k updates ahead for a forward and s_B =
    ⌊k/2⌋ for a backward. Under `async` their own weights are then at version m − (N−1−k) and m, so both say
    the one target above: s = m + ⌊k/2⌋ − version. A replica has the same target and a version of its own.

    `F3@1+2` is the forward of minibatch 3 with the weights after 1 update, predicted 2 further:

        worker 0: F0@0   F1@0+1 F2@0+2 ..     ..     B0@0   F3@1+2 B1@1   ..     B2@2   ..     B3@3
        worker 1: ..     F0@0   F1@0+1 ..     B0@0   F2@1+1 B1@1   F3@2+1 B2@2   ..     B3@3
        worker 2: ..     ..     F0@0+1 B0@0+1 F1@1+1 B1@1+1 F2@2+1 B2@2+1 F3@3+1 B3@3+1

    Before the first update there is no direction to predict in: a pass then sees the weights as they are.

    Memory: one predicted copy of the weights at a time; the direction is the optimizer's own (`predict.py`).
    From: Chen, Yang, Cheng 2018 (SpecTrain), arXiv 1809.02839.
    """

    name: ClassVar[str] = "spectrain"
    needs_prediction: ClassVar[bool] = True

    def ahead(self, *, phase: Phase, minibatch: int, version: int, owner: int, workers: int) -> int:
        return minibatch + owner // 2 - version

    def check(self, schedule: Schedule) -> None:
        """Refuse schedules with a flush, and minibatches split without one."""
        super().check(schedule)
        if schedule.microbatches > 1:
            raise PolicyError(
                f"policy '{self.name}' does not predict within a minibatch yet: schedule '{schedule.name}' "
                f"has {schedule.microbatches} microbatches",
                hint="use 1 microbatch, or schedule 1f1b with policy latest",
            )
