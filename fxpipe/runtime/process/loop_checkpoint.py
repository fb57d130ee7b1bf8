"""The checkpoints that a user's own loop saves and loads, of a pipeline with nothing in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fxpipe.checkpoint.manifest import check_replaceable
from fxpipe.checkpoint.shard import complete, write_shard
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.errors import CheckpointError
from fxpipe.files import disk_explained, replacing
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.checkpoints import Report, files_of, reported
from fxpipe.runtime.process.resume import Resumed, about_run, opened
from fxpipe.runtime.process.world import Job
from fxpipe.runtime.wires.exchange import agreeing, gathered, of_worker_0
from fxpipe.runtime.worker.captures import shard_at_rest
from fxpipe.runtime.worker.executor import Executor

ELSEWHERE = "choose another folder"


def write_together(folder: Path, job: Job[PipelineOptions], executors: Sequence[Executor], step: int) -> None:
    """Make a checkpoint: worker 0's process makes the folder, all write, worker 0's process completes it.

    Args:
        executors: those here that have something to write.

    Raises:
        BuildError, CheckpointError: in all processes, if it cannot be written in one.
    """
    rank, plan = job.process, job.plan
    fresh: Path | None = None

    def report(executor: Executor, to: Path) -> Report:
        worker, replica = executor.worker, executor.replica
        return reported(worker, replica, lambda: write_shard(to, plan, worker, shard_at_rest(executor), replica))

    with agreeing(), ExitStack() as stack:
        with agreeing():
            if rank == 0:
                with disk_explained(folder, ELSEWHERE):
                    check_replaceable(folder)
                fresh = stack.enter_context(replacing(folder, ELSEWHERE))
        fresh = of_worker_0(fresh)
        assert fresh is not None
        reports = gathered([report(executor, fresh) for executor in executors])
        files = files_of([each for of_process in reports for each in of_process])
        if rank == 0:
            complete(fresh, plan, step, step, about_run(job.options, job.recipe, plan), files)


def open_checkpoint(folder: str | Path, job: Job[PipelineOptions]) -> tuple[Checkpoint, Resumed]:
    """Open a checkpoint that a loop goes on from; the loop keeps its options.

    Raises:
        BuildError: it does not fit the plan.
        CheckpointError: it is no checkpoint of fxpipe, or was changed.
    """
    checkpoint = Checkpoint.open(folder, job.plan)
    if checkpoint.manifest is None:
        raise CheckpointError(
            f"{folder} has weights, but no training state",
            hint="to start from weights, make the pipeline with weights=...",
        )
    options = dataclasses.replace(job.options, resume=str(folder), weights=str(folder))
    resumed = opened(options, job.recipe, job.plan, checkpoint)
    assert resumed is not None
    return checkpoint, resumed
