"""What a schedule and a policy ask of one worker, and how many microbatches a replica of it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StageDemands:
    """What is asked of a worker that has one process.

    Attributes:
        owned_factor, owned_ms: as in `Workers`.
        depth: workers from this one to the last.
        held: the most microbatches that it holds.
        deferred: of these, the most between B and W, where W is apart.
        flush: whether it holds none from one minibatch to the next.
    """

    owned_factor: float
    owned_ms: float
    depth: int
    held: int
    deferred: int
    flush: bool


def held(stage: StageDemands, alone: int, after: int, replicas: int, own: int) -> int:
    """The most microbatches that one replica holds, if the worker holds `alone` where each worker has one process.

    A worker k of N holds N − k microbatches in 1F1B so that all workers from it on have one each. So where these have
    more processes, it holds as many more, and its replicas share them; with a flush no more than its own of a
    minibatch.

    Args:
        after: processes from the worker's first one to the last worker's last.
        replicas: of them, the worker's own.
        own: microbatches of a minibatch that a replica does.
    """
    found = math.ceil(alone * after / (stage.depth * replicas))
    return min(found, own) if stage.flush else found
