"""Schedules that are tables: each rank's actions of one minibatch, the same for every minibatch."""

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

    Each rank flushes separately: it begins a minibatch when it has ended the one before.
    """

    synchronous: ClassVar[bool] = True

    @abstractmethod
    def rows(self) -> list[list[Event]]:
        """Each rank's actions of minibatch 0."""

    @cached_property
    def table(self) -> list[list[Event]]:
        """`rows`, computed once."""
        return self.rows()

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        return (action for of, action in self.row(self.placement[worker], start) if of == worker)

    def row(self, rank: int, start: int = 0) -> Iterator[Event]:
        for minibatch in count(start):
            yield from ((worker, action.of(minibatch)) for worker, action in self.table[rank])
