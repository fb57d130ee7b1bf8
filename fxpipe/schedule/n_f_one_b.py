"""TiMePReSt's nF1B: all forwards of a minibatch, then its whole backward, without a flush."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import ClassVar

from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule, divisors


class NForwardsOneBackward(Schedule):
    """The M forwards of a minibatch, one after the other, then its M backwards, without a flush.

        worker 0: F0   F0.1 F1   F1.1 F2   F2.1 B0   B0.1 F3   F3.1 B1   B1.1 ..   ..   B2   B2.1 ..   ..   B3   B3.1
        worker 1: ..   F0   F0.1 F1   F1.1 B0   B0.1 F2   F2.1 B1   B1.1 F3   F3.1 B2   B2.1 ..   ..   B3   B3.1
        worker 2: ..   ..   F0   F0.1 B0   B0.1 F1   F1.1 B1   B1.1 F2   F2.1 B2   B2.1 F3   F3.1 B3   B3.1

    Worker k of N starts with M + 2(N−1−k) forwards, then M backwards and M forwards take turns. So it holds the saved
    values of M + 2(N−1−k) microbatches. Its F of microbatch j of minibatch m misses ⌈(2(N−1−k) − j)/M⌉ updates of its
    weights, or none where that is negative; its B of minibatch m misses none. With one microbatch it is `async`.

    With policy `latest` no weights are stashed and backwards read the newest ones, as in the paper. In the paper the
    backward is a single one of the whole minibatch, and a forward reads on every worker the version that worker 0 had.
    Here it is M backwards in a row: their gradients have the same sum, each frees its microbatch's saved values, and
    the worker before begins after the first of them. They take turns with the forwards without a wait if a backward
    takes as long as a forward. If it takes longer, up to N−1 times the difference is waited for in each minibatch.
    From: Dutta et al. 2024 (TiMePReSt), arXiv 2410.14312, of which we know the abstract and summaries by others.
    """

    name: ClassVar[str] = "nf1b"
    synchronous: ClassVar[bool] = False

    @classmethod
    def usual_microbatches(cls, workers: int, samples: int) -> int:
        """So many that no forward misses more than one update: the first divisor from 2(N−1) on, else the largest."""
        return min((d for d in divisors(samples) if d >= 2 * (workers - 1)), default=samples)

    def ahead(self, worker: int) -> int:
        """As many as a minibatch has, less one, and one for each hop to the last worker and back."""
        return self.microbatches - 1 + min(2, self.microbatches) * super().ahead(worker)

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        size = self.microbatches
        forwards = (Action("F", start + flat // size, flat % size) for flat in count())
        yield from islice(forwards, self.ahead(worker) + 1 - size)
        for minibatch in count(start):
            yield from islice(forwards, size)
            yield from (Action("B", minibatch, microbatch) for microbatch in range(size))
