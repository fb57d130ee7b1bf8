"""A schedule: the order of actions on every worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

from fxpipe.errors import ScheduleError
from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action


@dataclass(frozen=True)
class Schedule(ABC):
    """The order of actions on each of `workers` workers, with `microbatches` microbatches per minibatch.

    A worker updates its weights as part of the last action of a minibatch's last microbatch, and at no other time: that
    is its B, or its W in a schedule that has weight gradients apart.

    Attributes:
        name: its name on the command line.
        synchronous: every action of minibatch m sees exactly the updates of the minibatches before m.
        weights_apart: each microbatch has an action W after its B, which makes its weight gradients.
    """

    name: ClassVar[str]
    synchronous: ClassVar[bool]
    weights_apart: ClassVar[bool] = False
    workers: int
    microbatches: int = 1

    def __post_init__(self) -> None:
        for what in ("workers", "microbatches"):
            value = getattr(self, what)
            if value < 1:
                raise ScheduleError(f"schedule '{self.name}' needs at least 1 of {what}, not {value}")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What each microbatch has an action of, in that order."""
        return ("F", "B", "W") if self.weights_apart else ("F", "B")

    @property
    def last_phase(self) -> Phase:
        """The phase of a microbatch's last action."""
        return self.phases[-1]

    def runs_in(self, phase: Phase) -> Phase:
        """The phase of the action that does the work of a phase: without actions of their own, weight gradients are
        made in B."""
        return phase if phase in self.phases else self.last_phase

    def updates(self, action: Action) -> bool:
        """Whether the worker's update of a minibatch is part of this action."""
        return action.phase == self.last_phase and action.microbatch == self.microbatches - 1

    def update_of(self, minibatch: int) -> Action:
        """The action that ends with the worker's update of a minibatch."""
        return Action(self.last_phase, minibatch, self.microbatches - 1)

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

        It ends with the last update of its minibatches. A schedule that lacks a backward would never end: it is cut off
        after more later actions than a pipeline could hold, and `check` names what is missing.
        """
        last, left = self.last_phase, (stop - start) * self.microbatches
        patience = 4 * self.workers * self.microbatches
        if left <= 0:
            return
        for action in self.actions(worker, start):
            if action.minibatch >= stop:
                patience -= 1
                if patience < 0:
                    return
                continue
            yield action
            left -= action.phase == last
            if left == 0:
                return


def divisors(number: int) -> list[int]:
    """The numbers that divide one, in rising order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
