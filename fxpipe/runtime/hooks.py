"""The user's file and the build's stages, as a run meets them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import TaskError
from fxpipe.plan import Plan
from fxpipe.policy.experience import warning
from fxpipe.runtime.assembly import Recipe
from fxpipe.runtime.executor import Executor
from fxpipe.runtime.feed import TrainingTask
from fxpipe.runtime.loaded_stage import LoadedStage
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.update import MakeOptimizer, MakeScheduler


@dataclass(frozen=True)
class ObjectTask:
    """The same hooks, given as objects."""

    data: Callable[[], Iterable[Any]]
    make_optimizer: MakeOptimizer
    make_scheduler: MakeScheduler | None = None

    def train_data(self) -> Iterable[Any]:
        return self.data()

    def optimizer(self, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return self.make_optimizer(named_parameters)

    def lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any | None:
        return self.make_scheduler(optimizer) if self.make_scheduler else None


def task_of(options: RunOptions, plan: Plan) -> TrainingTask:
    """The user's hooks: the file that the options name, else the plan's (relative to the build).

    Raises:
        TaskError: no file is known, or it cannot be loaded.
    """
    from fxpipe.task import load_task

    if options.model_file is not None:
        return load_task(options.model_file)
    if plan.model_file is None:
        raise TaskError(
            "the build was compiled from objects, so there is no file with train_data()",
            hint="use the Python API: fxpipe.load(BUILD).local(...)",
        )
    return load_task(Path(options.build) / plan.model_file)


def warn_of_staleness(recipe: Recipe, executor: Executor) -> None:
    """One line on stderr for a policy that the accuracy study saw fail with this worker's optimizer."""
    optimizer = executor.store.updater.optimizer
    if recipe.schedule.synchronous or optimizer is None:
        return
    behind = recipe.demand.versions.lag("F", 0, 0)
    found = warning(str(recipe.policy), type(optimizer).__name__, behind)
    if found:
        print(f"warning: {found}", file=sys.stderr)


def warn_if_edited(stage: LoadedStage) -> None:
    """One line on stderr for a stage that is no longer as it was emitted."""
    if stage.edited:
        print(f"warning: {stage.path} was edited since it was compiled; running it as it is", file=sys.stderr)
