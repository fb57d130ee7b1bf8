"""GPipe: all forwards of a minibatch, then all its backwards."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule


class GPipe(Schedule):
    """All forwards of a minibatch, then all its backwards, then the flush.

        worker 0: F0   F0.1 ..   ..   ..   ..   B0   B0.1 F1   F1.1 ..   ..   ..   ..   B1   B1.1
        worker 1: ..   F0   F0.1 ..   ..   B0   B0.1 ..   ..   F1   F1.1 ..   ..   B1   B1.1
        worker 2: ..   ..   F0   F0.1 B0   B0.1 ..   ..   ..   ..   F1   F1.1 B1   B1.1

    A worker holds the saved values of all microbatches at once. From: Huang et al. 2019, arXiv 1811.06965.
    """

    name: ClassVar[str] = "gpipe"
    synchronous: ClassVar[bool] = True
    takes_replicas: ClassVar[bool] = True

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        for minibatch in count(start):
            for microbatch in range(self.microbatches):
                yield Action("F", minibatch, microbatch)
            for microbatch in range(self.microbatches):
                yield Action("B", minibatch, microbatch)
