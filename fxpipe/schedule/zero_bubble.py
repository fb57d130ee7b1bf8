"""Zero bubble: weight gradients, which no worker waits for, fill the time in which 1F1B waits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule


class ZeroBubble(Schedule):
    """One forward, one backward, one W within each minibatch; later workers put W off, so that B leaves sooner.

    Worker k of N starts with d(N−1−k) forwards, and is d·k microbatches late with its W, where d is `depth`. So every
    worker holds saved values of at most d(N−1)+1 microbatches: those whose F is done and whose W is not.

    If the actions take times F, B and W on every worker, a minibatch of M ≥ d(N−1)+1 microbatches takes M(F+B+W) plus
    the bubble.

    Attributes:
        depth: how many microbatches a worker is ahead of the next one.
    """

    synchronous: ClassVar[bool] = True
    weights_apart: ClassVar[bool] = True
    depth: ClassVar[int]

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        ahead = min(self.microbatches, self.depth * self.ahead(worker))
        late = min(self.microbatches, self.depth * self.level(worker))
        for minibatch in count(start):
            for microbatch in range(ahead):
                yield Action("F", minibatch, microbatch)
            for microbatch in range(self.microbatches):
                if microbatch + ahead < self.microbatches:
                    yield Action("F", minibatch, microbatch + ahead)
                yield Action("B", minibatch, microbatch)
                if microbatch >= late:
                    yield Action("W", minibatch, microbatch - late)
            for microbatch in range(self.microbatches - late, self.microbatches):
                yield Action("W", minibatch, microbatch)


class ZeroBubbleH1(ZeroBubble):
    """1F1B with separate weight gradients (W): a third of its bubble, if F, B and W take the same time.

        worker 0: F0   F0.1 F0.2 ..   ..   B0   W0   F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3
        worker 1: ..   F0   F0.1 ..   B0   F0.2 B0.1 W0   F0.3 B0.2 W0.1 B0.3 W0.2 W0.3
        worker 2: ..   ..   F0   B0   F0.1 B0.1 F0.2 B0.2 W0   F0.3 B0.3 W0.1 W0.2 W0.3

    If W ≤ F, the bubble is (N−1)(F+B−W); 1F1B's is (N−1)(F+B+W). Every worker holds saved values of at most N
    microbatches, as the first worker of 1F1B does. torch calls it ZB1P. From: Qi et al. 2024 (Zero Bubble Pipeline
    Parallelism, ICLR, arXiv 2401.10241), ZB-H1.
    """

    name: ClassVar[str] = "zb-h1"
    depth: ClassVar[int] = 1


class ZeroBubbleH2(ZeroBubble):
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
