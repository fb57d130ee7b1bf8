"""A forward sees weights predicted for the updates it misses, a backward the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpipe.policy.base import PredictingPolicy
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule


@dataclass(frozen=True)
class PipeOptim(PredictingPolicy):
    """Forward and backward of minibatch m see version m: the forward a prediction of it, the backward itself.

    Version m has the updates of all earlier minibatches and no others, as in synchronous training. A forward that can
    have version v misses s = m − v updates, counted from the schedule (without microbatches N−1−k on worker k of N, as
    in the paper), and sees Ŵ = W_v − s·(the optimizer's step). A worker's own backward misses none; a weight copy may
    miss some, and is predicted in the same way.

        worker 0: F0@0   F1@0+1 F2@0+2 ..     ..     B0@0   F3@1+2 B1@1   ..     B2@2   ..     B3@3
        worker 1: ..     F0@0   F1@0+1 ..     B0@0   F2@1+1 B1@1   F3@2+1 B2@2   ..     B3@3
        worker 2: ..     ..     F0@0   B0@0   F1@1   B1@1   F2@2   B2@2   F3@3   B3@3

    Memory: one predicted copy of the weights at a time; with `keep`, one for every minibatch in flight.
    From: Guan et al. (PipeOptim), arXiv 2312.00839; `keep` is the second variant in SpecTrain's official port.

    Attributes:
        keep: the backward reads the predicted weights of its forward again.
    """

    name: ClassVar[str] = "pipeoptim"

    keep: bool = False

    @property
    def keeps_forward(self) -> bool:  # type: ignore[override]
        return self.keep

    def ahead(self, action: Action, version: int, owner: int, schedule: Schedule) -> int:
        return action.minibatch - version
