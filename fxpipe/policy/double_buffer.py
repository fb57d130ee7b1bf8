"""Every action sees the older of two versions: PipeDream-2BW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpipe.errors import PolicyError
from fxpipe.plan.spec import Phase
from fxpipe.policy.base import Policy
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.versions import Versions, most_missed


@dataclass(frozen=True)
class DoubleBuffer(Policy):
    """A delay of one update on every worker, for any number of workers: W(m+1) = W(m) − η·∇f(W(m−1)).

    Forward and backward of all microbatches of minibatch m see version m−1. That version is ready in time only if no
    forward misses more updates: with `async`, if a minibatch has at least N−1 microbatches. Here it has 2; `F1.1` is
    the forward of the second one of minibatch 1:

        worker 0: F0@0   F0.1@0 F1@0   ..     ..     B0@0   F1.1@0 B0.1@0 ..     B1@0   ..     B1.1@0
        worker 1: ..     F0@0   F0.1@0 ..     B0@0   F1@0   B0.1@0 F1.1@0 B1@0   ..     B1.1@0
        worker 2: ..     ..     F0@0   B0@0   F0.1@0 B0.1@0 F1@0   B1@0   F1.1@0 B1.1@0

    Under `async-late` they see version m−2.

    Memory: two copies on every worker, the live weights included.
    From: Narayanan et al. 2021 (PipeDream-2BW), ICML, arXiv 2006.09503.

    With `predict`, they see version m−1 predicted one update ahead, which is version m, the one that the update meets:
    W(m+1) = W(m) − η·∇f(Ŵ(m)), with one Ŵ(m), predicted after m−1 updates, for both passes and all microbatches.
    Both passes read the same tensors: they are predicted while version m−1 is live, and kept. With 2 workers:

        worker 0: F0@0   F1@0+1 ..     B0@0   F2@1+1 B1@0+1 F3@2+1 B2@1+1 ..     B3@2+1
        worker 1: ..     F0@0   B0@0   F1@0+1 B1@0+1 F2@1+1 B2@1+1 F3@2+1 B3@2+1

    Then there are three copies, on the last worker two. The prediction is SpecTrain's (`predict.py`); combining it with
    2BW is our own.

    Attributes:
        predict: see the older version predicted one update ahead.
    """

    name: ClassVar[str] = "2bw"

    predict: bool = False

    @property
    def predicts(self) -> bool:  # type: ignore[override]
        return self.predict

    def ahead(self, action: Action, version: int, owner: int, schedule: Schedule) -> int:
        return action.minibatch - version if self.predict else 0

    def lag(self, newest: Versions, phase: Phase, microbatch: int, reader: int, owner: int) -> int:
        # On a single worker no weights are stale, unless updates are late.
        return min(1 + newest.schedule.late, newest.lag("F", 0, 0))

    def check(self, schedule: Schedule) -> None:
        """Refuse schedules with a flush, and fewer microbatches than two buffers need."""
        super().check(schedule)
        missed = most_missed(schedule) - schedule.late
        if missed > 1:
            raise PolicyError(
                f"policy '{self}' has two versions of the weights, but with schedule '{schedule.name}' on "
                f"{schedule.workers} workers and microbatches={schedule.microbatches} a forward misses {missed} "
                "updates: the version before the last would come too late for it",
                hint=f"compile with more --microbatches (with async {schedule.workers - 1}), "
                "or use policy vertical, which does the same with a longer delay",
            )
