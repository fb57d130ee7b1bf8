"""The functions that a run calls while it trains: the user's `on_step`, `on_eval` and `on_epoch`.

    def on_step(step, loss, run): ...     # after every step, with the number of steps so far
    def on_eval(step, metrics, run): ...  # after every evaluation
    def on_epoch(epoch, run): ...         # after every epoch and its evaluation, from 1

If one returns something true, the run ends. `run` is the run itself: `run.save()`, `run.set_lr(rate)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpipe.task.signatures import check_signature

OnStep = Callable[[int, float, Any], object]
OnEval = Callable[[int, dict[str, float], Any], object]
OnEpoch = Callable[[int, Any], object]
ON_STEP = "on_step"
ON_EVAL = "on_eval"
ON_EPOCH = "on_epoch"
CALLBACKS = {ON_STEP: "(step, loss, run)", ON_EVAL: "(step, metrics, run)", ON_EPOCH: "(epoch, run)"}
"""The hooks, and their arguments."""


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of one run; None is not called."""

    on_step: OnStep | None = None
    on_eval: OnEval | None = None
    on_epoch: OnEpoch | None = None
    path: Path | None = None  # the file that defines them, if one is known

    def __post_init__(self) -> None:
        for name in self.names:
            check_signature(name, getattr(self, name), CALLBACKS[name], self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the hooks that are given."""
        return tuple(name for name in CALLBACKS if getattr(self, name) is not None)
