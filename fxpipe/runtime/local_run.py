"""`fxpipe run --local`: the whole run in this process, with the same files and the same numbers as the real one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fxpipe.folder import read_plan
from fxpipe.runtime.feed import Feed, TrainingTask
from fxpipe.runtime.final_weights import held, write_final_weights
from fxpipe.runtime.hooks import task_of, warn_if_edited, warn_of_staleness
from fxpipe.runtime.local import LocalPipeline
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.progress import Progress, default_progress
from fxpipe.runtime.record import FINAL_WEIGHTS, Record, samples_of, worker_row
from fxpipe.runtime.staleness import watch_staleness


def run_local(
    options: RunOptions, task: TrainingTask | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Train a build with all its workers in this process; the summary (see `Record`).

    Args:
        task: the user's hooks; by default the file that options or plan name.
        progress: by default one that fits stderr, if `options.progress`.

    Raises:
        FxpipeError: whatever the user can mend.
    """
    plan = read_plan(options.build)
    task = task or task_of(options, plan)
    if progress is None and options.progress:
        progress = default_progress()
    with threads(options.threads, plan.workers):
        feed = Feed(task, options.seed)
        total = feed.total(options.steps, options.epochs)
        record = Record(options.out, samples_of(plan), total, progress)
        try:
            pipeline = LocalPipeline(
                options.build, task.optimizer, task.lr_scheduler, options.schedule, options.policy,
                options.seed, record.step, keep_gradients=False, clip_norm=options.clip_norm, backend=options.backend,
            )  # fmt: skip
            for executor in pipeline.executors:
                warn_if_edited(executor.stage)
                if options.log_staleness:
                    watch_staleness(executor.store, options.out)
            warn_of_staleness(pipeline.recipe, pipeline.executors[0])
            record.begin()
            for _ in range(total):
                pipeline.step(feed.next_batch())
            pipeline.flush()
        finally:
            record.close()
        if record.out is not None:
            executors = pipeline.executors
            write_final_weights(Path(record.out) / FINAL_WEIGHTS, plan, lambda t: held(executors[t.worker], t))
        rows = [worker_row(e, record.seconds) for e in pipeline.executors]
    return record.summary(rows)


def cores() -> int:
    """The CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(asked: int | None, local_workers: int) -> int:
    """CPU threads of one worker: what is asked for, else its share of the cores."""
    return asked or max(1, cores() // local_workers)


@contextmanager
def threads(asked: int | None, local_workers: int) -> Iterator[None]:
    """As many threads as one worker of the distributed run has: another number gives other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_for(asked, local_workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)
