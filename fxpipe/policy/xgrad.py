"""Forward and backward see weights predicted for the next update: with a flush, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpipe.policy.base import PredictingPolicy
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule


@dataclass(frozen=True)
class XGrad(PredictingPolicy):
    """Forward and backward of minibatch m see the same prediction of version m + 1, which its own update will make.

    The update changes the true weights. In the paper one process trains: version m is there, and its prediction is one
    step ahead. So it is with every schedule with a flush. Without one, a forward that has version v predicts m + 1 − v
    updates ahead, one more than under `pipeoptim+keep`, and its backward reads the same tensors again:

        worker 0: F0@0+1 F1@0+2 F2@0+3 ..     ..     B0@0+1 F3@1+3 B1@0+2 ..     B2@0+3 ..     B3@1+3
        worker 1: ..     F0@0+1 F1@0+2 ..     B0@0+1 F2@1+2 B1@0+2 F3@2+2 B2@1+2 ..     B3@2+2
        worker 2: ..     ..     F0@0+1 B0@0+1 F1@1+1 B1@1+1 F2@2+1 B2@2+1 F3@3+1 B3@3+1

    Memory: with a flush one predicted copy of the weights; without one, a copy for every minibatch in flight.
    From: Guan et al. (XGrad), arXiv 2305.18240: its abstract and its official code, whose steps ahead are 1 here; the
    extension to stale weights is our own. AdamW's decay belongs to our prediction (`rules.py`), not to that code's.
    """

    name: ClassVar[str] = "xgrad"
    keeps_forward: ClassVar[bool] = True
    with_flush: ClassVar[bool] = True

    def ahead(self, action: Action, version: int, owner: int, schedule: Schedule) -> int:
        return action.minibatch + 1 - version
