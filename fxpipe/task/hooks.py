"""Where a run gets its hooks: from the model file that a build names, or from objects."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn

from fxpipe.errors import TaskError
from fxpipe.plan.build_folder import model_path
from fxpipe.plan.spec import Plan
from fxpipe.task.model_file import Task, load_task
from fxpipe.task.model_view import asks_for_model, no_model
from fxpipe.task.step_hooks import StepHooks


def given_task(
    seen: Callable[[], nn.Module] | None = None, compiled: StepHooks | None = None, **hooks: Callable[..., Any] | None
) -> Task:
    """The hooks of the Python interface, by their names in a model file; all but the data have defaults.

    Args:
        seen, compiled: what the build has of the model, where the hooks have none; see `Task`.
        hooks: None is none.

    Raises:
        TaskError: one of them asks for the model, and there is none.
    """
    module = SimpleNamespace(**{name: hook for name, hook in hooks.items() if hook is not None})
    seen = hooks.get("model") or seen
    optimizer, reset = hooks.get("optimizer"), hooks.get("reset")
    for hook, asks in (("optimizer()", optimizer and asks_for_model(optimizer)), ("reset(model)", reset)):
        if asks and seen is None:
            raise no_model(hook)
    return Task(None, module, seen=seen, compiled=compiled)


def task_of_build(plan: Plan, folder: str, model_file: str | None = None) -> Task:
    """The model file given, else the one that the plan of the build in `folder` names, loaded.

    Raises:
        TaskError: no file is known, or it cannot be loaded.
    """
    path = model_path(plan, folder, model_file)
    if path is None:
        raise TaskError(
            "the build was compiled from objects, so there is no file with train_data()",
            hint="use the Python API: fxpipe.load(BUILD).local(...)",
        )
    return load_task(path)
