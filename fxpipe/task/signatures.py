"""The arguments that fxpipe calls each hook with; a hook that does not take them is refused before any work."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from fxpipe.errors import TaskError

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
"""Of each hook; those of callbacks are `fxpipe.task.callbacks.CALLBACKS`."""


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
