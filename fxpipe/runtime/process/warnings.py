"""What a run warns about before it begins: one line on stderr for each warning."""

from __future__ import annotations

from fxpipe.codecs import accuracy_warnings
from fxpipe.messages import warn
from fxpipe.optimizer.hurried_scheduler import hurried
from fxpipe.plan.spec import Plan
from fxpipe.policy.accuracy_warnings import warning
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.worker.executor import Executor
from fxpipe.stages.loaded import LoadedEvaluation, LoadedStage
from fxpipe.task.several_optimizers import parts_of


def warn_of_staleness(recipe: Recipe, executor: Executor) -> None:
    """Warn about a policy that failed with this worker's optimizer in the accuracy study."""
    optimizer = executor.store.updater.optimizer
    if recipe.schedule.synchronous or optimizer is None:
        return
    behind = recipe.demand.versions.lag("F", 0, 0)
    kinds = dict.fromkeys(type(part).__name__ for part in parts_of(optimizer))
    for found in (warning(str(recipe.policy), kind, behind) for kind in kinds):
        if found:
            warn(found)


def warn_of_codecs(plan: Plan) -> None:
    """Warn about codecs that lost more than a standard deviation in the accuracy study."""
    if found := accuracy_warnings.warning(accuracy_warnings.used_by(plan)):
        warn(found)


def warn_of_hurry(executor: Executor, total: int, epoch: int | None) -> None:
    """Warn about a scheduler that makes a step after every update and seems to be meant for epochs.

    Args:
        total: the steps of the run, none of which has been made.
        epoch: those of an epoch, if they are known.
    """
    updater = executor.store.updater
    if updater.optimizer is None or updater.scheduler is None or updater.per_epoch:
        return
    steps, of = (epoch, "an epoch") if epoch is not None and epoch <= total else (total, "this run")
    if found := hurried(updater.optimizer, updater.scheduler, steps, of):
        warn(found)


def warn_if_edited(*stages: LoadedStage | LoadedEvaluation) -> None:
    """Warn about files that were edited since they were emitted."""
    for stage in stages:
        if stage.edited:
            warn(f"{stage.path} was edited since it was compiled; running it as it is")
