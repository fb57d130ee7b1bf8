"""WPipe: two groups of stages whose updates take turns, without a flush."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import ClassVar

from fxpipe.errors import ScheduleError
from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Schedule


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
