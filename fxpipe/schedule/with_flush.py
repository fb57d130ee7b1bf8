"""Schedules with a flush and one worker on each rank: GPipe, 1F1B, and zero bubble with separate weight gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule


class WithFlush(Schedule):
    """In each minibatch some forwards, then one forward, one backward and perhaps one W in turn, then what is left.

    Worker k of N starts with d(N−1−k) forwards, where d is `depth`. If weight gradients are separate, it is d·k
    microbatches late with its W, so that B leaves sooner: every worker holds saved values of at most d(N−1)+1
    microbatches, those whose F is done and whose W is not. If the actions take times F, B and W on every worker, a
    minibatch of M ≥ d(N−1)+1 microbatches takes M(F+B+W) plus the bubble.

    Attributes:
        depth: how many microbatches a worker is ahead of the next one.
    """

    synchronous: ClassVar[bool] = True
    depth: ClassVar[int] = 1

    def early(self, worker: int) -> int:
        """How many forwards of a minibatch a worker does before its first backward."""
        return min(self.microbatches, self.depth * self.ahead(worker))

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        ahead = self.early(worker)
        late = min(self.microbatches, self.depth * self.level(worker)) if self.weights_apart else 0
        shifts: dict[Phase, int] = {"F": ahead, "B": 0, "W": -late}
        for minibatch in count(start):
            for step in range(-ahead, self.microbatches + late):
                for phase in self.phases:
                    if 0 <= step + shifts[phase] < self.microbatches:
                        yield Action(phase, minibatch, step + shifts[phase])


class GPipe(WithFlush):
    """All forwards of a minibatch, then all its backwards, then the flush.

        worker 0: F0   F0.1 ..   ..   ..   ..   B0   B0.1 F1   F1.1 ..   ..   ..   ..   B1   B1.1
        worker 1: ..   F0   F0.1 ..   ..   B0   B0.1 ..   ..   F1   F1.1 ..   ..   B1   B1.1
        worker 2: ..   ..   F0   F0.1 B0   B0.1 ..   ..   ..   ..   F1   F1.1 B1   B1.1

    A worker holds the saved values of all microbatches at once. From: Huang et al. 2019, arXiv 1811.06965.
    """

    name: ClassVar[str] = "gpipe"
    takes_replicas: ClassVar[bool] = True

    def early(self, worker: int) -> int:
        return self.microbatches


class OneFOneB(WithFlush):
    """One forward, one backward within each minibatch, then the flush.

        worker 0: F0   F0.1 F0.2 ..   ..   B0   F0.3 B0.1 ..   B0.2 ..   B0.3
        worker 1: ..   F0   F0.1 ..   B0   F0.2 B0.1 F0.3 B0.2 ..   B0.3
        worker 2: ..   ..   F0   B0   F0.1 B0.1 F0.2 B0.2 F0.3 B0.3

    Worker k of N starts with N−1−k forwards, so it holds the saved values of at most N−k microbatches.
    From: PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503) and DAPPLE (Fan et al. 2021).
    """

    name: ClassVar[str] = "1f1b"
    takes_replicas: ClassVar[bool] = True


class ZeroBubbleH1(WithFlush):
    """1F1B with separate weight gradients (W): a third of its bubble, if F, B and W take the same time.

        worker 0: F0   F0.1 F0.2 ..   ..   B0   W0   F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3
        worker 1: ..   F0   F0.1 ..   B0   F0.2 B0.1 W0   F0.3 B0.2 W0.1 B0.3 W0.2 W0.3
        worker 2: ..   ..   F0   B0   F0.1 B0.1 F0.2 B0.2 W0   F0.3 B0.3 W0.1 W0.2 W0.3

    If W ≤ F, the bubble is (N−1)(F+B−W); 1F1B's is (N−1)(F+B+W). Every worker holds saved values of at most N
    microbatches, as the first worker of 1F1B does. torch calls it ZB1P. From: Qi et al. 2024 (Zero Bubble Pipeline
    Parallelism, ICLR, arXiv 2401.10241), ZB-H1.
    """

    name: ClassVar[str] = "zb-h1"
    weights_apart: ClassVar[bool] = True


class ZeroBubbleH2(ZeroBubbleH1):
    """ZB-H1 with twice the forwards ahead: no bubble, if F, B and W take the same time.

        worker 0: F0   F0.1 F0.2 F0.3 F0.4 B0   W0   F0.5 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3 B0.4 W0.4 B0.5 W0.5
        worker 1: ..   F0   F0.1 F0.2 B0   F0.3 B0.1 F0.4 B0.2 W0   F0.5 B0.3 W0.1 B0.4 W0.2 B0.5 W0.3 W0.4 W0.5
        worker 2: ..   ..   F0   B0   F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 F0.4 B0.4 W0   F0.5 B0.5 W0.1 W0.2 W0.3 W0.4 W0.5

    If W ≤ F, the bubble is (N−1)(F+B−2W), or none if that is negative. Every worker holds saved values of at most 2N−1
    microbatches. The flush stays: each worker updates after its own last W and continues, later workers later, so the
    minibatches are parallelograms that fit together. In the paper, workers update before the norm of all gradients is
    known, and undo a wrong update; here, clipping by that norm makes the workers wait for each other. From: Qi et al.
    2024 (Zero Bubble Pipeline Parallelism, ICLR, arXiv 2401.10241), ZB-H2.
    """

    name: ClassVar[str] = "zb-h2"
    depth: ClassVar[int] = 2
