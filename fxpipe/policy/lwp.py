"""A forward sees weights predicted by repeating the last update: linear weight prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpipe.policy.base import Policy
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule


@dataclass(frozen=True)
class LinearWeightPrediction(Policy):
    """Like `pipeoptim`, but from the weights alone: Ŵ = W_v + s·(W_v − W_v−1), with any optimizer.

    This is the weight form of the paper; its delay D is s here. The paper's velocity form is `pipeoptim` with SGD.

        worker 0: F0@0   F1@0+1 F2@0+2 ..     ..     B0@0   F3@1+2 B1@1   ..     B2@2   ..     B3@3
        worker 1: ..     F0@0   F1@0+1 ..     B0@0   F2@1+1 B1@1   F3@2+1 B2@2   ..     B3@3
        worker 2: ..     ..     F0@0   B0@0   F1@1   B1@1   F2@2   B2@2   F3@3   B3@3

    Memory: the last update, and one predicted copy of the weights at a time.
    From: Kosson et al. 2020 (Pipelined Backpropagation at Scale), arXiv 2003.11666.
    """

    name: ClassVar[str] = "lwp"
    predicts: ClassVar[bool] = True
    weight_form: ClassVar[bool] = True

    def ahead(self, action: Action, version: int, owner: int, schedule: Schedule) -> int:
        return action.minibatch - version
