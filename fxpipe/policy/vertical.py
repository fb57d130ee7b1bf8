"""Every action of a minibatch, on every worker, sees the version that its forward saw on worker 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpipe.plan.spec import Phase
from fxpipe.policy.base import Policy
from fxpipe.schedule.versions import Versions


@dataclass(frozen=True)
class Vertical(Policy):
    """A minibatch sees one version on all workers, forward and backward: gradients of one model, N−1 updates old.

    W(m+1) = W(m) − η·∇f(W(m−N+1)), the same delay for all workers.

        worker 0: F0@0 F1@0 F2@0 ..   ..   B0@0 F3@1 B1@0 ..   B2@0 ..   B3@1
        worker 1: ..   F0@0 F1@0 ..   B0@0 F2@0 B1@0 F3@1 B2@0 ..   B3@1
        worker 2: ..   ..   F0@0 B0@0 F1@0 B1@0 F2@0 B2@0 F3@1 B3@1

    Memory: N copies on every worker, the live weights included; that is more than `stash` needs.
    From: vertical sync in Narayanan et al. 2019 (PipeDream), SOSP.
    """

    name: ClassVar[str] = "vertical"
    one_pipeline: ClassVar[bool] = True

    def lag(self, newest: Versions, phase: Phase, microbatch: int, reader: int, owner: int) -> int:
        return newest.lag("F", 0, 0, microbatch)
