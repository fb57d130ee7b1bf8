"""Opens the pipeline of a user's own loop: all workers in this process, or those of one among several."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from fxpipe.plan.build_folder import read_plan
from fxpipe.runtime.options import PipelineOptions, RunOptions
from fxpipe.runtime.process.allocator import reuse_freed_memory
from fxpipe.runtime.process.check_run import check_unchanged
from fxpipe.runtime.process.membership import membership
from fxpipe.runtime.process.pipeline import Pipeline
from fxpipe.runtime.process.resume import resumed_options
from fxpipe.runtime.process.together import barrier
from fxpipe.runtime.process.warnings import warn_if_edited
from fxpipe.runtime.process.world import AmongProcesses, OneProcess
from fxpipe.runtime.worker.checkpoint import Checkpoint
from fxpipe.task.model_file import Task


def open_local(folder: str | Path, task: Task, options: PipelineOptions, out: str | None = None) -> Pipeline:
    """A pipeline with all workers in this process: for debugging, studies of many workers, and a single device.

        pipeline = fxpipe.load("build/").local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
        losses = pipeline.run(data)
        model.load_state_dict(pipeline.state_dict())

    It gives the same bits as one over processes: the same actions, versions, seeds and memory layouts.

    Raises:
        FxpipeError: as `Pipeline`.
    """
    plan = read_plan(folder)
    options = resumed_options(options, out)
    checkpoint = None if options.weights is None else Checkpoint.open(options.weights, plan)
    return Pipeline(folder, plan, task, options, OneProcess(plan, options), checkpoint, out)


def open_joined(options: RunOptions, task: Task) -> Pipeline:
    """A pipeline whose ranks are in processes that all run the user's loop.

    Args:
        options: of the run, without those that `check_own_loop` refuses.
        task: makes the optimizers of the workers of this process.

    Raises:
        FxpipeError: as `membership` and `Pipeline`.
    """
    reuse_freed_memory()
    with ExitStack() as held:
        member = held.enter_context(membership(options, task))
        agreed = member.agreed
        world = AmongProcesses(agreed.plan, agreed.options, member.rank, member.pulse, member.pulses)
        leaves = ExitStack()
        pipeline = Pipeline(
            *(options.build, agreed.plan, agreed.task, agreed.options, world, agreed.checkpoint),
            out=agreed.options.out,
            held=leaves,
        )
        for executor in pipeline.executors:
            warn_if_edited(*executor.stages)
        check_unchanged(agreed.files)
        barrier(pipeline.rank)
        member.pulse.phase = "training"
        leaves.push(held.pop_all())
    return pipeline
