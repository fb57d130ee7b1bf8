"""What a run says before it begins: one line on stderr for each warning."""

from __future__ import annotations

from fxpipe.codecs import accuracy_warnings
from fxpipe.messages import warn
from fxpipe.optimizer.hurried_scheduler import hurried
from fxpipe.plan.spec import Plan
from fxpipe.policy.accuracy_warnings import warning
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.process.resume import Resumed, say_resumed
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import warn_of_little_room
from fxpipe.stages.loaded import LoadedStage
from fxpipe.task.several_optimizers import parts_of


def say_first(
    resumed: Resumed | None,
    plan: Plan,
    recipe: Recipe,
    executor: Executor,
    out: str | None,
    total: int,
    epoch: int | None,
) -> None:
    """Say where the run goes on, and warn of what may go wrong; called where worker 0 is.

    Args:
        executor: of worker 0.
        out: the run's output folder.
        total: the steps of the run.
        epoch: those of an epoch, if they are known.
    """
    if resumed is not None:
        say_resumed(resumed)
    else:
        _warn_of_hurry(executor, total, epoch)
    _warn_of_staleness(recipe, executor)
    if found := accuracy_warnings.warning(accuracy_warnings.used_by(plan)):  # they lost more than a standard deviation
        warn(found)
    warn_of_little_room(out, plan, executor.store.averages is not None)


def _warn_of_staleness(recipe: Recipe, executor: Executor) -> None:
    """Warn about a policy that failed with this worker's optimizer in the accuracy study."""
    optimizer = executor.store.updater.optimizer
    if recipe.schedule.synchronous or optimizer is None:
        return
    behind = recipe.demand.versions.lag("F", 0, 0)
    kinds = dict.fromkeys(type(part).__name__ for part in parts_of(optimizer))
    for found in (warning(str(recipe.policy), kind, behind) for kind in kinds):
        if found:
            warn(found)


def _warn_of_hurry(executor: Executor, total: int, epoch: int | None) -> None:
    """Warn about a scheduler that makes a step after every update and seems to be meant for epochs."""
    updater = executor.store.updater
    if updater.optimizer is None or updater.scheduler is None or updater.per_epoch:
        return
    steps, of = (epoch, "an epoch") if epoch is not None and epoch <= total else (total, "this run")
    if found := hurried(updater.optimizer, updater.scheduler, steps, of):
        warn(found)


def warn_if_edited(*stages: LoadedStage) -> None:
    """Warn about files that were edited since they were emitted."""
    for stage in stages:
        if stage.edited:
            warn(f"{stage.path} was edited since it was compiled; running it as it is")
