"""`fxpipe run --local`: the whole run in this process, with the same files and numbers as a distributed run."""

from __future__ import annotations

from typing import Any

from fxpipe.errors import FxpipeError
from fxpipe.observe.progress import Progress, default_progress
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.agreement import Agreed
from fxpipe.runtime.process.check_run import check_run, files_read, writing
from fxpipe.runtime.process.last_saved import name_checkpoint
from fxpipe.runtime.process.rank import Run
from fxpipe.runtime.process.resume import resumed_options
from fxpipe.runtime.process.world import OneProcess
from fxpipe.task.hooks import task_of_build
from fxpipe.task.model_file import Task
from fxpipe.threads import threads


def run_local(options: RunOptions, task: Task | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Train a build with all its workers in this process; return the summary (see `summarize_run`).

    Args:
        task: the user's hooks; by default the file that options or plan name.
        progress: by default one that fits stderr, if `options.progress`.

    Raises:
        FxpipeError: any mistake that the user can fix.
    """
    with writing(options.out):
        options = resumed_options(options, options.out)
        files = files_read(options)
        plan, checkpoint = check_run(options, from_file=task is None)
        task = task or task_of_build(plan, options.build, options.model_file)
        if progress is None and options.progress:
            progress = default_progress()
        with threads(options.threads, plan.processes):
            run = Run(Agreed(options, plan, task, files, checkpoint), OneProcess(plan, options), progress)
            try:
                summary = run.run()
            except FxpipeError as error:
                if run.record is not None and run.record.own_steps:
                    name_checkpoint(error, options, options.out)
                raise
    assert summary is not None
    return summary
