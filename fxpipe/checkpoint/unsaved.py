"""Warns of Python state that an optimizer, a scheduler or a callback changes and that no checkpoint has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fxpipe.checkpoint.optimizer_state import left_out, scheduler_state
from fxpipe.errors import listed
from fxpipe.optimizer.state_outside import state_outside
from fxpipe.task.several_optimizers import parts_of
from fxpipe.tracing.holders import Attributes, Content, Memory
from fxpipe.tracing.lasting_state import noteworthy


class UnsavedState:
    """Create it before the first step.

    Args:
        scheduler: if its state cannot be written, a run that resumes repeats its steps, and nothing is lost.
        callbacks: functions of the user that are called during training.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any, callbacks: Iterable[Any] = ()) -> None:
        keeps = scheduler is not None and scheduler_state(scheduler) is not None
        not_saved = [_LeftOut(part) for part in parts_of(optimizer)]
        objects = [value for holder in not_saved for value in holder.read().values()]
        self._python = state_outside([optimizer, *([scheduler] if keeps else [])], [*objects, *callbacks])
        self._before = [*self._python.snapshot(), *((holder, holder.read()) for holder in not_saved)]
        self._said = False

    def warning(self) -> str | None:
        """The warning at a checkpoint, given once: what has changed, and how to keep it."""
        changes = [c for c in noteworthy(self._python.changes(self._before)) if not isinstance(c.holder, Memory)]
        if self._said or not changes:
            return None
        self._said = True
        names = listed(list(dict.fromkeys(map(str, changes))), 4)
        return (
            f"hooks of the optimizer, its scheduler or callbacks have changed {names}, which no checkpoint has: a run "
            "that resumes starts with the first value. Keep it in the optimizer's state or groups, or in the "
            "scheduler's state_dict(), which checkpoints have"
        )


class _LeftOut(Attributes):
    """The attributes of an optimizer that are not written."""

    def __init__(self, part: torch.optim.Optimizer) -> None:
        super().__init__(part, type(part).__name__)

    def read(self) -> Content:
        return left_out(self.thing)

    def write(self, content: Mapping[Any, Any]) -> None:
        """Do nothing: they are only read."""
