"""Turns of the rows of actions that one process walks: where one must wait for another, that one goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context

import torch
from greenlet import getcurrent, greenlet

from fxpipe.errors import RunError
from fxpipe.random_state import set_torch_state, torch_state


class Turns:
    """Walks several rows in one thread, each in a greenlet: their order decides, so every run takes the same turns.

    Attributes:
        draws: what a row computes between two turns may draw random numbers: each goes on with its own generator.
    """

    def __init__(self) -> None:
        self.draws = False
        self._grad = True  # outside of the rows
        self._waiting: dict[greenlet, tuple[Callable[[], bool], str]] = {}

    def walk(self, rows: Sequence[Callable[[], None]]) -> None:
        """Walk all rows to their ends.

        Raises:
            RunError: each waits for another, so none can go on.
            Exception: what a row has raised; the others are left where they are, and undo what they have begun.
        """
        if len(rows) == 1:
            rows[0]()
            return
        self._grad = torch.is_grad_enabled()
        rows_left = [greenlet(row) for row in rows]
        for row in rows_left:
            row.gr_context = copy_context()
        try:
            while rows_left:
                moved = False
                for row in list(rows_left):
                    if row in self._waiting and not self._waiting[row][0]():
                        continue
                    self._waiting.pop(row, None)
                    row.switch()
                    moved = True
                    if row.dead:
                        rows_left.remove(row)
                if not moved:
                    raise stuck([what for _, what in self._waiting.values()])
        finally:
            for row in rows_left:
                if row:
                    row.throw()
            self._waiting.clear()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Go on once something is ready.

        Args:
            what: the row's worker, and what it waits for, in words.

        Raises:
            RunError: no other row of this process could make it so.
        """
        if ready():
            return
        row = getcurrent()
        if row.parent is None:
            raise stuck([what])
        grad, state = torch.is_grad_enabled(), torch_state() if self.draws else None
        self._waiting[row] = ready, what
        torch.set_grad_enabled(self._grad)
        row.parent.switch()
        torch.set_grad_enabled(grad)
        if state is not None:
            set_torch_state(state)


def stuck(waiting: Sequence[str]) -> RunError:
    """The error of rows that wait for each other."""
    return RunError(
        f"the pipeline is stuck: {'; '.join(waiting)}",
        hint="this is a defect of fxpipe, or of an edited stage that no longer sends what another stage waits for",
    )
