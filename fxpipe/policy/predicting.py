"""Policies that predict weights: how many updates ahead each forward and each backward looks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from fxpipe.plan.spec import Phase
from fxpipe.policy.base import Policy, PredictingPolicy
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.versions import Versions


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
