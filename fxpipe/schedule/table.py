"""Schedules that are tables: what each rank does of one minibatch, the same for all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from itertools import count
from typing import ClassVar

from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Schedule


class Table(Schedule):
    """A schedule with a flush that is given by the rows of its ranks.

    The flush is each rank's own: a rank begins with a minibatch once it is through with the one before.
    """

    synchronous: ClassVar[bool] = True

    @abstractmethod
    def rows(self) -> list[list[Event]]:
        """What each rank does of minibatch 0."""

    @cached_property
    def table(self) -> list[list[Event]]:
        """`rows`, made once."""
        return self.rows()

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        return (action for of, action in self.row(self.placement[worker], start) if of == worker)

    def row(self, rank: int, start: int = 0) -> Iterator[Event]:
        for minibatch in count(start):
            yield from ((worker, action.of(minibatch)) for worker, action in self.table[rank])
