"""A checkpoint of an empty pipeline, in any folder, and back: for a user's own loop.

Its files are those of a run's checkpoints: `fxpipe run --resume` and `--weights` take it, and a loop takes a run's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fxpipe.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from fxpipe.checkpoint.shard import INDEX, write_index, write_shard
from fxpipe.checkpoint.tensor_file import write_bytes
from fxpipe.checkpoint.tree import Unwritable
from fxpipe.errors import CheckpointError
from fxpipe.files import sync_folder
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.resume import Resumed, about_run, opened
from fxpipe.runtime.worker.captures import shard_at_rest
from fxpipe.runtime.worker.checkpoint import Checkpoint
from fxpipe.runtime.worker.executor import Executor

Written = dict[str, FileEntry]


def write_own(folder: Path, plan: Plan, executor: Executor) -> Written:
    """Write a worker's files.

    Raises:
        CheckpointError: the disk does not take them, or the optimizer's state holds what is no plain value.
    """
    try:
        return write_shard(folder, plan, executor.worker, shard_at_rest(executor))
    except (OSError, Unwritable) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"worker {executor.worker} cannot write its part of a checkpoint: {text}") from error


def write_whole(
    folder: Path, plan: Plan, recipe: Recipe, options: PipelineOptions, step: int, written: Sequence[Written]
) -> None:
    """Make a checkpoint of what all workers have written into a folder.

    Raises:
        OSError: the disk does not take it.
    """
    files = {name: entry for of_worker in written for name, entry in of_worker.items()}
    files[INDEX] = write_index(folder, plan)
    manifest = Manifest(step, step, plan.workers, **about_run(options, recipe, plan), files=files)
    write_bytes(folder / MANIFEST, manifest.to_json().encode())
    sync_folder(folder)


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
