"""Epochs in steps: what all workers do every epoch, though worker 0 alone has the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from fxpipe.errors import TaskError
from fxpipe.runtime.options import PipelineOptions, RunOptions, steps_or_epoch
from fxpipe.runtime.process.together import gathered, of_worker_0
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.feed import Feed
from fxpipe.task.paced_scheduler import EPOCH

Options = TypeVar("Options", bound=PipelineOptions)

OF_EPOCHS = ("eval_every", "checkpoint_every")
"""The options that may say `epoch`."""


def in_steps(options: Options) -> Options:
    """The options with a number of steps where they say `epoch`.

    Raises:
        TaskError: it is not known how many that is, or none.
        FxpipeError: they say something else.
    """
    if options.steps_per_epoch is not None and options.steps_per_epoch < 1:
        raise TaskError(f"an epoch has {options.steps_per_epoch} steps", hint="steps_per_epoch=len(DATA)")
    if isinstance(every := getattr(options, "eval_every", None), str):
        steps_or_epoch(every)
    named = [name for name in OF_EPOCHS if getattr(options, name, None) == EPOCH]
    if not named:
        return options
    if options.steps_per_epoch is None:
        raise TaskError(
            f"{named[0]} is every epoch, and it is not known how many steps that is", hint="steps_per_epoch=len(DATA)"
        )
    steps: dict[str, Any] = {"eval_every": options.steps_per_epoch, "checkpoint_every": str(options.steps_per_epoch)}
    return dataclasses.replace(options, **{name: steps[name] for name in named})


def counted(options: RunOptions, feed: Feed, epochs: bool) -> tuple[int, int | None]:
    """How many minibatches a run has, and how many an epoch, if an option names epochs: by the data.

    Args:
        epochs: something else must know.

    Raises:
        TaskError: the data are empty; or have no length, and counting them takes too long.
    """
    total, per_epoch = options.steps, options.steps_per_epoch
    if total is None:
        total = (feed.epoch() if per_epoch is None else per_epoch) * (1 if options.epochs is None else options.epochs)
    asked = epochs or any(getattr(options, name) == EPOCH for name in OF_EPOCHS)
    return total, epoch_of(feed) if asked and per_epoch is None else per_epoch


def agree_length(options: RunOptions, feed: Feed | None, rank: int, epochs: bool) -> tuple[int, RunOptions]:
    """How many minibatches the run has, and the options in steps; called by all workers.

    Args:
        feed: on worker 0.
        epochs: as of `counted`.
    """
    total, epoch = of_worker_0((0, None) if feed is None else counted(options, feed, epochs), rank)
    return total, in_steps(dataclasses.replace(options, steps_per_epoch=epoch))


def agree_epoch(executors: Sequence[Executor], feed: Feed | None, rank: int, ranks: int) -> int | None:
    """Tell the schedulers and the hook `reset` of the workers here how long an epoch is, if any worker's must know;
    called by all processes.

    Returns:
        How long one is, as far as this process knows.
    """
    if any(gathered(any(map(_must_know, executors)), rank, ranks)):
        epoch = of_worker_0(None if feed is None else epoch_of(feed), rank)
        for executor in executors:
            executor.store.updater.steps_per_epoch = epoch
    steps = executors[0].store.updater.steps_per_epoch
    for executor in executors:
        if executor.resets is not None:
            executor.resets.every = steps
    return steps or (None if feed is None else feed.length)


def _must_know(executor: Executor) -> bool:
    updater = executor.store.updater
    return updater.steps_per_epoch is None and (updater.per_epoch or executor.resets is not None)


def epoch_of(feed: Feed) -> int:
    """How many steps an epoch of the data is; from now on, one of another length is told."""
    feed.steps_per_epoch = feed.epoch()
    return feed.steps_per_epoch
