"""Interleaved 1F1B: several short stages on a rank, so that the pipeline fills and drains in shorter steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fxpipe.errors import ScheduleError
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Table


class Interleaved(Table):
    """1F1B of V workers on each of R ranks: worker k runs on rank k mod R, and microbatches go round in groups of R.

    Of 4 workers on 2 ranks and 2 microbatches, each cell with its worker:

        rank 0: 0:F0   0:F0.1 2:F0   2:F0.1 ..     2:B0   ..     2:B0.1 0:B0   0:B0.1
        rank 1: ..     1:F0   1:F0.1 3:F0   3:B0   3:F0.1 3:B0.1 1:B0   1:B0.1

    Rank r begins with 2(R−1−r) + (V−1)R forwards. If F and B are a worker's times, the bubble of a minibatch is
    (R−1)(F+B), for M a multiple of R; the bubble of 1F1B is V times as long, as its stages are. There are V times as
    many messages. From: Narayanan et al. 2021 (Megatron-LM), SC, arXiv 2104.04473.
    """

    name: ClassVar[str] = "interleaved"
    usual_virtual: ClassVar[int] = 2

    def check_placement(self) -> None:
        super().check_placement()
        rounds = tuple(worker % self.ranks for worker in range(self.workers))
        if self.placement != rounds or self.workers % self.ranks:
            raise ScheduleError(
                f"schedule '{self.name}' has its workers on ranks 0, 1, …, 0, 1, …, equally many on each, not on "
                f"{list(self.placement)}",
                hint=f"compile the model for it: fxpipe compile MODEL -n {self.ranks} --virtual 2 --schedule "
                f"{self.name}",
            )

    def rows(self) -> list[list[Event]]:
        ranks, virtual = self.ranks, self.workers // self.ranks
        rows = []
        for rank in range(ranks):
            mine = range(rank, self.workers, ranks)
            forwards, backwards = list(self._turns(mine)), list(self._turns(mine[::-1]))
            ahead = min(len(forwards), 2 * (ranks - 1 - rank) + (virtual - 1) * ranks)
            row: list[Event] = [(worker, Action("F", 0, j)) for worker, j in forwards[:ahead]]
            for place, (worker, j) in enumerate(backwards):
                if place + ahead < len(forwards):
                    later, microbatch = forwards[place + ahead]
                    row.append((later, Action("F", 0, microbatch)))
                row.append((worker, Action("B", 0, j)))
            rows.append([event for event in row if event[1].microbatch < self.microbatches])
        return rows

    def _turns(self, workers: range) -> Iterator[tuple[int, int]]:
        """The worker and microbatch of each turn: R microbatches on one worker, the same on the next one, and so on.

        The last group is whole, too; the rows leave out microbatches that do not exist.
        """
        for first in range(0, self.microbatches, self.ranks):
            for worker in workers:
                for j in range(first, first + self.ranks):
                    yield worker, j
