"""The arguments that fxpipe calls hooks with, and the hooks that a run calls while it trains.

    def on_step(step, loss, run): ...     # after every step, with the number of steps so far
    def on_eval(step, metrics, run): ...  # after every evaluation
    def on_epoch(epoch, run): ...         # after every epoch and its evaluation, from 1

If one returns something true, the run ends. `run` is the run itself: `run.save()`, `run.set_lr(rate)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpipe.errors import TaskError

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


ARGUMENTS = {
    "model": "()",
    "loss": "(model, batch)",
    "train_data": "()",
    "optimizer": "(named_parameters)",
    "configure_optimizers": "(model)",
    "lr_scheduler": "(optimizer)",
    "averaged": "(optimizer, named_parameters)",
    "eval_data": "()",
    "metrics": "(model, batch)",
    "metrics_of_all": "(gathered)",
    "loss_weight": "(batch)",
    "reset": "(model)",
}
"""Of each other hook."""


def check_signature(name: str, function: Any, arguments: str, path: Path | None) -> None:
    """Refuse what is not a function of these arguments, which are as in its definition: `(step, loss, run)`."""
    where, hint = None if path is None else path.name, f"def {name}{arguments}"
    if not callable(function):
        raise TaskError(f"{name} is {type(function).__name__}, not a function", where=where, hint=hint)
    if not takes(function, arguments.strip("()").count(",") + (arguments != "()")):
        raise TaskError(f"{name}{inspect.signature(function)} has other parameters", where=where, hint=hint)


def takes(function: Any, count: int) -> bool:
    """Whether it can be called with so many arguments, as far as it says so: a builtin may not."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # the call will show
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
