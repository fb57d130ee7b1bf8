"""A checkpoint of an empty pipeline, in any folder, and back: for a user's own loop.

Its files are those of a run's checkpoints: `fxpipe run --resume` and `--weights` take it, and a loop takes a run's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fxpipe.checkpoint.manifest import FileEntry
from fxpipe.checkpoint.shard import complete, write_shard
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.checkpoint.tree import said
from fxpipe.errors import CheckpointError, FxpipeError, PeerLost
from fxpipe.files import replacing
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.resume import Resumed, about_run, opened
from fxpipe.runtime.process.together import agree_on, agreed_error, gathered, of_worker_0
from fxpipe.runtime.worker.captures import shard_at_rest
from fxpipe.runtime.worker.executor import Executor

Written = dict[str, FileEntry]


def write_own(folder: Path, plan: Plan, executor: Executor) -> Written:
    """Write the files of a replica of a worker.

    Raises:
        CheckpointError: the disk does not take them, or the optimizer's state holds what is no plain value.
    """
    try:
        return write_shard(folder, plan, executor.worker, shard_at_rest(executor), executor.replica)
    except Exception as error:  # of the user's objects, too: the other workers are to hear of it
        what = f"worker {executor.worker} cannot write its part of a checkpoint: {said(error)}"
        raise CheckpointError(what) from error


def write_together(
    folder: Path,
    plan: Plan,
    recipe: Recipe,
    options: PipelineOptions,
    executors: Sequence[Executor],
    step: int,
    rank: int,
) -> FxpipeError | None:
    """Make a checkpoint: the process of worker 0 makes the folder, all write, that one makes it whole.

    Args:
        executors: those here that have something to write.
        rank: of this process.

    Returns:
        The error that all are to raise; None if the checkpoint is there.
    """
    workers = plan.processes
    error: FxpipeError | None = None
    try:
        with ExitStack() as stack:
            fresh: Path | None = None
            if rank == 0:
                try:
                    fresh = stack.enter_context(replacing(folder, "choose another folder"))
                except FxpipeError as found:
                    error = found
            fresh = of_worker_0(fresh, rank)
            written: Written = {}
            if fresh is not None:
                try:
                    for executor in executors:
                        written |= write_own(fresh, plan, executor)
                except FxpipeError as found:
                    error = found
            agree_on(error, rank, workers)
            files = gathered(written, rank, workers)
            if rank == 0 and fresh is not None:
                whole = {name: entry for of_worker in files for name, entry in of_worker.items()}
                complete(fresh, plan, step, step, about_run(options, recipe, plan), whole)
    except PeerLost:
        raise
    except FxpipeError as found:
        error = found
    return agreed_error(error, rank, workers)


def open_checkpoint(
    folder: str | Path, plan: Plan, recipe: Recipe, options: PipelineOptions
) -> tuple[Checkpoint, Resumed]:
    """A checkpoint that a loop goes on from; its options stay those it has.

    Raises:
        BuildError: it does not fit the plan.
        CheckpointError: it is none of fxpipe's, or not as it was written.
    """
    checkpoint = Checkpoint.open(folder, plan)
    if checkpoint.manifest is None:
        raise CheckpointError(
            f"{folder} holds weights alone, and no state of a training",
            hint="weights=..., where the pipeline is made, starts from weights",
        )
    there = dataclasses.replace(options, resume=str(folder), weights=str(folder))
    resumed = opened(there, recipe, plan, checkpoint)
    assert resumed is not None
    return checkpoint, resumed
