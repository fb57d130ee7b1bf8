"""Schedules without a flush: PipeDream's 1F1B, the same with late updates, TiMePReSt's nF1B, and WPipe."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import ClassVar

from fxpipe.errors import ScheduleError
from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Schedule, divisors


class Async(Schedule):
    """One forward, one backward, without a flush: no worker waits for long, but its weights are stale.

        worker 0: F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4
        worker 1: .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4
        worker 2: .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    Worker k of N starts with N−1−k forwards and updates after every minibatch, so its F of minibatch m sees
    version m − (N−1−k) of its weights, its B version m. From: Narayanan et al. 2019 (PipeDream), SOSP.
    """

    name: ClassVar[str] = "async"
    synchronous: ClassVar[bool] = False
    takes_replicas: ClassVar[bool] = True

    @classmethod
    def usual_microbatches(cls, workers: int, samples: int) -> int:
        """So many that weights are at most one update old on every worker: N, or the nearest divisor from N−1 to 2N.

        Without such a divisor, the largest one below. Two workers are one update late with a single microbatch, which
        is then the fastest. benchmarks/accuracy measures the cost of each choice.
        """
        if workers < 3:
            return 1
        counts = divisors(samples)
        enough = [d for d in counts if workers - 1 <= d <= 2 * workers]
        few = max(d for d in counts if d < workers)
        return min(enough, key=lambda d: (abs(d - workers), -d), default=few)

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        ahead = self.ahead(worker)
        for flat in range(ahead):
            yield self._action("F", start, flat)
        for flat in count():
            yield self._action("F", start, flat + ahead)
            yield self._action("B", start, flat)

    def _action(self, phase: Phase, start: int, flat: int) -> Action:
        """The action of the `flat`-th microbatch since minibatch `start`."""
        return Action(phase, start + flat // self.microbatches, flat % self.microbatches)


class AsyncLate(Async):
    """The order of `async`, but a minibatch's update is made when the next minibatch is over, or by a flush.

        worker 0: F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4
        worker 1: .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4
        worker 2: .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

    B1 ends with the update of minibatch 0. Worker k of N misses one update more than with `async`: its F of minibatch m
    sees version m − (N−1−k) − 1 of its weights, its B version m − 1.

    It is for replicas (`--dp`): they sum the gradients of minibatch m during all of minibatch m + 1, while `async`
    waits for the part of the sum that the backward of m does not hide. Without replicas there is no such sum, and it
    only misses one more update and holds one more set of gradients. With one worker it is data parallelism with
    gradients one step old. From: Li et al. 2018 (Pipe-SGD), NeurIPS, arXiv 1811.03619, for one worker.
    """

    name: ClassVar[str] = "async-late"
    takes_replicas: ClassVar[bool] = False  # of different numbers
    late: ClassVar[int] = 1


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


class WPipe(Schedule):
    """Rank r of R runs worker r of the first group and worker R + r of the second, whose updates take turns.

    Of 4 workers on 2 ranks and 2 microbatches, each cell with its worker:

        rank 0: 0:F0   0:F0.1 2:F0   2:F0.1 ..     2:B0   0:F1   2:B0.1 0:F1.1 0:B0   2:F1   0:B0.1 2:F1.1 2:B1 …
        rank 1: ..     1:F0   1:F0.1 3:F0   3:B0   3:F0.1 3:B0.1 1:F1   1:B0   1:F1.1 1:B0.1 3:F1   3:B1   3:F1.1 …

    A rank starts with M + min(M, R−r) − 1 forwards; then one forward and one backward take turns. In the second group
    all forwards of a minibatch come after the update of the one before. In the first group they come before its
    backwards, so they miss exactly one update. No backward misses any. So with policy `stash`, which is the paper's,
    minibatch m sees version m−1 of the first group and version m of the second, and only the first group has a second
    copy of its weights: half of the delay and of the copies of 2BW. No rank waits if M ≥ R; if not, a minibatch takes
    R + 1 − M times as long. From: Yang et al. 2022 (WPipe), ICLR: its abstract and official code, whose M is R.
    """

    name: ClassVar[str] = "wpipe"
    synchronous: ClassVar[bool] = False
    usual_virtual: ClassVar[int] = 2

    def check_placement(self) -> None:
        super().check_placement()
        if self.placement != tuple(range(self.ranks)) * 2:
            raise ScheduleError(
                f"schedule '{self.name}' has two workers on each rank, on ranks 0, 1, …, 0, 1, …, not on "
                f"{list(self.placement)}",
                hint="leave out --virtual",
            )

    def ahead(self, worker: int) -> int:
        early = self.microbatches if worker < self.ranks else 0
        return early + min(self.microbatches, self.ranks - self.placement[worker]) - 1

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        return (action for of, action in self.row(self.placement[worker], start) if of == worker)

    def row(self, rank: int, start: int = 0) -> Iterator[Event]:
        first, second = rank, self.ranks + rank
        forwards, backwards = self._turns("F", (first, second), start), self._turns("B", (second, first), start)
        yield from islice(forwards, self.ahead(first))
        for forward, backward in zip(forwards, backwards, strict=True):
            yield from (forward, backward)

    def _turns(self, phase: Phase, workers: tuple[int, int], start: int) -> Iterator[Event]:
        for minibatch in count(start):
            for worker in workers:
                yield from ((worker, Action(phase, minibatch, j)) for j in range(self.microbatches))
