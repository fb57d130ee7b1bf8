"""A backward sees what its forward saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpipe.policy.base import Policy


@dataclass(frozen=True)
class Stash(Policy):
    """A forward sees the newest weights, and its backward sees the same: exact gradients at stale weights.

    On worker k of N: W(m+1) = W(m) − η·∇f(W(m−(N−1−k))), each worker with its own delay.

    `B2@1` is the backward of minibatch 2 with the weights after 1 update:

        worker 0: F0@0 F1@0 F2@0 ..   ..   B0@0 F3@1 B1@0 ..   B2@0 ..   B3@1
        worker 1: ..   F0@0 F1@0 ..   B0@0 F2@1 B1@0 F3@2 B2@1 ..   B3@2
        worker 2: ..   ..   F0@0 B0@0 F1@1 B1@1 F2@2 B2@2 F3@3 B3@3

    Memory: a copy for every minibatch in flight, N−k on worker k of N, the live weights included; fewer with
    microbatches, of which ⌈(N−1−k)/M⌉ minibatches are in flight.
    From: weight stashing in Narayanan et al. 2019 (PipeDream), SOSP.
    """

    name: ClassVar[str] = "stash"
    keeps_forward: ClassVar[bool] = True
