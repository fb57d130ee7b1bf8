"""Turns of the rows of actions that one process walks: where one must wait for another, that one goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import NamedTuple

import torch
from greenlet import getcurrent, greenlet

from fxpipe.errors import RunError
from fxpipe.random_state import set_torch_state, torch_state


class Turns:
    """Walks several rows in one thread, each in a greenlet: their order decides, so every run takes the same turns.

    Attributes:
        draws: what rows compute between two turns may draw random numbers: each goes on with its own generator.
    """

    def __init__(self) -> None:
        self.draws = False
        self._rows: list[greenlet] = []
        self._waiting: dict[greenlet, _Held] = {}
        self._grad = True  # outside of the rows

    def walk(self, rows: Sequence[Callable[[], None]]) -> None:
        """Walk rows to their ends.

        Raises:
            RunError: each waits for another, so none can go on.
            Exception: what a row has raised; the others undo what they have begun.
        """
        self.begin(rows)
        self.go()

    def begin(self, rows: Sequence[Callable[[], None]]) -> None:
        """There are these rows, of which nothing is done yet."""
        self._rows = [greenlet(partial(self._walk, row)) for row in rows]
        for row in self._rows:
            row.gr_context = copy_context()

    def go(self) -> None:
        """Walk all rows until each is at its end or idle; errors as `walk`."""
        self._grad = torch.is_grad_enabled()
        try:
            while any([self._go(row) for row in self._rows]):
                self._rows = [row for row in self._rows if not row.dead]
            if busy := [waiting.what for waiting in self._waiting.values() if not waiting.idle]:
                raise stuck(*busy)
        except BaseException:
            self.end()
            raise
        finally:
            torch.set_grad_enabled(self._grad)

    def end(self) -> None:
        """Leave all rows where they are: they undo what they have begun."""
        rows, self._rows = self._rows, []
        for row in rows:
            if row:
                row.throw()
        self._waiting.clear()

    def _walk(self, row: Callable[[], None]) -> None:
        torch.set_grad_enabled(self._grad)  # whatever the row before it has left
        row()

    def _go(self, row: greenlet) -> bool:
        waiting = self._waiting.get(row)
        if row.dead or (waiting is not None and not waiting.ready()):
            return False
        self._waiting.pop(row, None)
        row.switch()
        return True

    def wait(self, ready: Callable[[], bool], what: Callable[[], str], idle: bool = False) -> None:
        """Go on once something is ready.

        Args:
            what: says which worker waits for what.
            idle: what it waits for is not another row's.

        Raises:
            RunError: no other row of this process could make it so.
        """
        if ready():
            return
        row = getcurrent()
        if row.parent is None:
            raise stuck(what)
        grad, state = torch.is_grad_enabled(), torch_state() if self.draws else None
        self._waiting[row] = _Held(ready, what, idle)
        row.parent.switch()
        if grad != torch.is_grad_enabled():
            torch.set_grad_enabled(grad)
        if state is not None:
            set_torch_state(state)


class _Held(NamedTuple):
    ready: Callable[[], bool]
    what: Callable[[], str]
    idle: bool


def stuck(*waiting: Callable[[], str]) -> RunError:
    """The error of rows that wait for each other."""
    return RunError(
        f"the pipeline is stuck: {'; '.join(what() for what in waiting)}",
        hint="this is a defect of fxpipe, or of an edited stage that no longer sends what another stage waits for",
    )
