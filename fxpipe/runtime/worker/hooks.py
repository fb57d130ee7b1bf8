"""The user's file and the build's stages, as a run meets them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import FxpipeError, PeerLost, RunError, TaskError
from fxpipe.observe.record import FINAL_WEIGHTS
from fxpipe.plan.spec import Plan
from fxpipe.policy.experience import warning
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.process.options import RunOptions
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.feed import TrainingTask
from fxpipe.runtime.worker.initial_weights import Start
from fxpipe.stages.loaded import LoadedEvaluation, LoadedStage
from fxpipe.task.model_file import MakeOptimizer, MakeScheduler


@dataclass(frozen=True)
class ObjectTask:
    """The same hooks, given as objects."""

    data: Callable[[], Iterable[Any]]
    make_optimizer: MakeOptimizer
    make_scheduler: MakeScheduler | None = None
    make_model: Callable[[], nn.Module] | None = None
    eval_batches: Callable[[], Iterable[Any]] | None = None

    def model(self) -> nn.Module:
        if self.make_model is None:
            raise TaskError(
                "the build has no values of the parameters (--meta), and no model was given to initialise them",
                hint="give join() a checkpoint (weights=...), or model=, a function that makes the model",
            )
        return self.make_model()

    @property
    def validates(self) -> bool:
        return self.eval_batches is not None

    def train_data(self) -> Iterable[Any]:
        return self.data()

    def eval_data(self) -> Iterable[Any]:
        assert self.eval_batches is not None
        return self.eval_batches()

    def optimizer(self, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return self.make_optimizer(named_parameters)

    def lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any | None:
        return self.make_scheduler(optimizer) if self.make_scheduler else None


def task_of(options: RunOptions, plan: Plan) -> TrainingTask:
    """The user's hooks: the file that the options name, else the plan's (relative to the build).

    Raises:
        TaskError: no file is known, or it cannot be loaded.
    """
    from fxpipe.task.model_file import load_task

    if options.model_file is not None:
        return load_task(options.model_file)
    if plan.model_file is None:
        raise TaskError(
            "the build was compiled from objects, so there is no file with train_data()",
            hint="use the Python API: fxpipe.load(BUILD).local(...)",
        )
    return load_task(Path(options.build) / plan.model_file)


def start_of(options: RunOptions, task: TrainingTask) -> Start:
    """Where the run's first weights come from."""
    return Start(options.weights, task.model, options.seed)


def evaluates(plan: Plan, task: TrainingTask, eval_every: int | None) -> bool:
    """Whether a run evaluates in its pipeline.

    Raises:
        RunError: it is asked to, while it trains, and cannot.
    """
    if eval_every is not None:
        check_evaluation(plan, f"evaluation every {eval_every} steps")
        if not task.validates:
            raise RunError(f"evaluation every {eval_every} steps needs eval_data", hint="give both, or neither")
    return bool(plan.evaluations) and task.validates


def check_evaluation(plan: Plan, what: str) -> None:
    """Refuse `what` for a build without evaluation.

    Raises:
        RunError: it has none; says why.
    """
    if plan.evaluations:
        return
    if plan.not_evaluated:
        raise RunError(
            f"{what} needs a build with evaluation, and this one has none: {plan.not_evaluated}",
            hint="mend that and compile again; without it, `fxpipe run` evaluates the trained weights in one process",
        )
    raise RunError(
        f"{what} needs a build with evaluation, and this one has none",
        hint="define eval_data() and metrics(model, batch) in the model file, and compile it again",
    )


@contextmanager
def weights_are_safe(out: str | None) -> Iterator[None]:
    """What goes wrong after the trained weights were written says that they were."""
    try:
        yield
    except PeerLost:
        raise
    except FxpipeError as error:
        safe = None if out is None else f"the trained weights are safe in {Path(out) / FINAL_WEIGHTS}"
        error.hint = "; ".join(text for text in (error.hint, safe) if text) or None
        raise


def warn_of_staleness(recipe: Recipe, executor: Executor) -> None:
    """One line on stderr for a policy that the accuracy study saw fail with this worker's optimizer."""
    optimizer = executor.store.updater.optimizer
    if recipe.schedule.synchronous or optimizer is None:
        return
    behind = recipe.demand.versions.lag("F", 0, 0)
    found = warning(str(recipe.policy), type(optimizer).__name__, behind)
    if found:
        print(f"warning: {found}", file=sys.stderr)


def warn_if_edited(stage: LoadedStage | LoadedEvaluation) -> None:
    """One line on stderr for a file that is no longer as it was emitted."""
    if stage.edited:
        print(f"warning: {stage.path} was edited since it was compiled; running it as it is", file=sys.stderr)
