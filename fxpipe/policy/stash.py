"""A backward sees what its forward saw."""

from __future__ import annotations

from typing import ClassVar

from fxpipe.plan import Phase
from fxpipe.policy.base import Policy


class Stash(Policy):
    """A forward sees the newest weights, its backward the same ones: right gradients of stale weights.

    `B2@1` is the backward of minibatch 2 with the weights after 1 update:

        worker 0: F0@0 F1@0 F2@0 ..   ..   B0@0 F3@1 B1@0 ..   B2@0 ..   B3@1
        worker 1: ..   F0@0 F1@0 ..   B0@0 F2@1 B1@0 F3@2 B2@1 ..   B3@2
        worker 2: ..   ..   F0@0 B0@0 F1@1 B1@1 F2@2 B2@2 F3@3 B3@3

    Memory: a copy for every minibatch in flight, N−k on worker k of N, the live weights included.
    From: weight stashing in Narayanan et al. 2019 (PipeDream), SOSP.
    """

    name: ClassVar[str] = "stash"
    backward_keeps_forward: ClassVar[bool] = True

    def ahead(self, *, phase: Phase, minibatch: int, version: int, owner: int, workers: int) -> int:
        return 0
