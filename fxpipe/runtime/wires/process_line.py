"""The processes of a run in a line, along which they tell each other what concerns processes and not workers."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.plan.spec import Plan


@dataclass(frozen=True)
class ProcessLine:
    """For each process the first of its workers speaks; who has the earlier one comes before.

    So what begins at worker 0 goes the way of the forwards. With one worker a rank, it is all workers in their order.

    Attributes:
        speakers: the workers that speak, in rising order.
        own: this process's.
    """

    speakers: tuple[int, ...]
    own: int

    @staticmethod
    def of(plan: Plan, rank: int) -> ProcessLine:
        """That of a run, as this rank sees it."""
        speakers = [plan.hosted(each)[0] for each in range(plan.ranks)]
        return ProcessLine(tuple(sorted(speakers)), speakers[rank])

    @property
    def before(self) -> int | None:
        """The speaker before this one; None for the first, which is worker 0."""
        place = self.speakers.index(self.own)
        return self.speakers[place - 1] if place else None

    @property
    def after(self) -> int | None:
        """The speaker after this one; None for the last."""
        return next(iter(self.speakers[self.speakers.index(self.own) + 1 :]), None)

    @property
    def others(self) -> tuple[int, ...]:
        """All speakers but this one."""
        return tuple(speaker for speaker in self.speakers if speaker != self.own)
