"""A schedule: the order of actions on every worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

from fxpipe.errors import ScheduleError
from fxpipe.schedule.action import Action


@dataclass(frozen=True)
class Schedule(ABC):
    """The order of actions on each of `workers` workers, with `microbatches` microbatches per minibatch.

    A worker updates its weights as part of its backward of a minibatch's last microbatch, and at no other time.

    Attributes:
        name: its name on the command line.
        synchronous: every action of minibatch m sees exactly the updates of the minibatches before m.
    """

    name: ClassVar[str]
    synchronous: ClassVar[bool]
    workers: int
    microbatches: int = 1

    def __post_init__(self) -> None:
        for what in ("workers", "microbatches"):
            value = getattr(self, what)
            if value < 1:
                raise ScheduleError(f"schedule '{self.name}' needs at least 1 of {what}, not {value}")

    @classmethod
    def usual_microbatches(cls, workers: int, samples: int) -> int:
        """How many microbatches to make of a minibatch of `samples`, where nothing is asked; a divisor of `samples`.

        With a flush, as many as keep all workers busy: the smallest divisor that is not below their number, else the
        largest.
        """
        return min((d for d in divisors(samples) if d >= workers), default=samples)

    @abstractmethod
    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        """The endless schedule of `worker` from minibatch `start` on, beginning with an empty pipeline."""

    def until(self, worker: int, stop: int, start: int = 0) -> Iterator[Action]:
        """The finite schedule of minibatches [start, stop): the endless one without the later minibatches.

            actions(0):        F0 F1 B0 F2 B1 F3 B2 …
            until(0, stop=2):  F0 F1 B0    B1

        It ends with the last backward of its minibatches. A schedule that lacks one would never end: it is cut off
        after more later actions than a pipeline could hold, and `check` names what is missing.
        """
        backwards = (stop - start) * self.microbatches
        patience = 4 * self.workers * self.microbatches
        if backwards <= 0:
            return
        for action in self.actions(worker, start):
            if action.minibatch >= stop:
                patience -= 1
                if patience < 0:
                    return
                continue
            yield action
            backwards -= action.phase == "B"
            if backwards == 0:
                return


def divisors(number: int) -> list[int]:
    """The numbers that divide one, in rising order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
