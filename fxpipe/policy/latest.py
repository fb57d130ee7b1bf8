"""Every action sees the newest weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxpipe.policy.base import Policy


@dataclass(frozen=True)
class Latest(Policy):
    """Forward and backward see the newest weights: under `async`, those of one minibatch may differ.

    `F2@1` is the forward of minibatch 2 with the weights after 1 update, here under `async`:

        worker 0: F0@0 F1@0 F2@0 ..   ..   B0@0 F3@1 B1@1 ..   B2@2 ..   B3@3
        worker 1: ..   F0@0 F1@0 ..   B0@0 F2@1 B1@1 F3@2 B2@2 ..   B3@3
        worker 2: ..   ..   F0@0 B0@0 F1@1 B1@1 F2@2 B2@2 F3@3 B3@3

    Memory: the weights, once. Under a schedule with a flush this is ordinary training. With M microbatches it is PACI:
    a forward misses at most ⌈(N−1)/M⌉ updates.

    From: PACI 2026, arXiv 2606.07881, for the microbatches.
    """

    name: ClassVar[str] = "latest"
    with_flush: ClassVar[bool] = True
