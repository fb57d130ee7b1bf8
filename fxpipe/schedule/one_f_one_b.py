"""1F1B with a flush: computes the same as GPipe, with fewer microbatches in flight."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule


class OneFOneB(Schedule):
    """One forward, one backward within each minibatch, then the flush.

        worker 0: F0   F0.1 F0.2 ..   ..   B0   F0.3 B0.1 ..   B0.2 ..   B0.3
        worker 1: ..   F0   F0.1 ..   B0   F0.2 B0.1 F0.3 B0.2 ..   B0.3
        worker 2: ..   ..   F0   B0   F0.1 B0.1 F0.2 B0.2 F0.3 B0.3

    Worker k of N starts with N−1−k forwards, so it holds the saved values of at most N−k microbatches.
    From: PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503) and DAPPLE (Fan et al. 2021).
    """

    name: ClassVar[str] = "1f1b"
    synchronous: ClassVar[bool] = True
    takes_replicas: ClassVar[bool] = True

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        ahead = min(self.microbatches, self.ahead(worker))
        for minibatch in count(start):
            for microbatch in range(ahead):
                yield Action("F", minibatch, microbatch)
            for microbatch in range(self.microbatches):
                if microbatch + ahead < self.microbatches:
                    yield Action("F", minibatch, microbatch + ahead)
                yield Action("B", minibatch, microbatch)
