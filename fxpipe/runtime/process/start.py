"""Begins a run, or the pipeline of a user's own loop: with all workers in this process, or as one of several."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.errors import FxpipeError
from fxpipe.observe.progress import Progress, default_progress
from fxpipe.observe.pulse import Pulse
from fxpipe.plan.build_folder import read_plan
from fxpipe.runtime.options import PipelineOptions, RunOptions
from fxpipe.runtime.process.check_run import (
    check_run,
    check_unchanged,
    files_read,
    refuse_moves,
    task_of_run,
    writing,
)
from fxpipe.runtime.process.device import reuse_freed_memory
from fxpipe.runtime.process.last_saved import name_checkpoint
from fxpipe.runtime.process.membership import Agreed, membership
from fxpipe.runtime.process.pipeline import Pipeline
from fxpipe.runtime.process.rank import TrainingRun
from fxpipe.runtime.process.resume import resumed_options
from fxpipe.runtime.process.run_summary import warn_if_edited
from fxpipe.runtime.process.stopping import MovingProcess
from fxpipe.runtime.process.world import AmongProcesses, Job, OneProcess
from fxpipe.runtime.wires.exchange import barrier
from fxpipe.runtime.worker.feed import in_steps
from fxpipe.task.model_file import Task
from fxpipe.threads import threads


@contextmanager
def displayed(progress: Progress | None) -> Iterator[None]:
    """The display ends with this, before an error is printed. Inside, `breakpoint()` first ends it: it would draw over
    the debugger's prompt."""
    before, close = sys.breakpointhook, progress.close if progress is not None else lambda: None

    def stop(*arguments: Any, **more: Any) -> Any:
        close()
        if before is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in os.environ:
            return _debugger().set_trace(sys._getframe(1))  # where it was called, not here
        return before(*arguments, **more)

    sys.breakpointhook = stop
    try:
        yield
    finally:
        sys.breakpointhook = before
        close()


def _debugger() -> Any:
    """Python's debugger, whose `quit` is a Ctrl-C: not an error of the code that it stopped in."""
    import bdb
    import pdb

    class Debugger(pdb.Pdb):
        def trace_dispatch(self, frame: Any, event: str, arg: Any) -> Any:
            try:
                return super().trace_dispatch(frame, event, arg)
            except bdb.BdbQuit:
                raise KeyboardInterrupt from None

    return Debugger()


def run_local(options: RunOptions, task: Task | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Train a build with all its workers in this process; return the summary (see `RunJson.to_json`).

    By default, the hooks are those of the file that options or plan name, and the display fits stderr, if the options
    ask for one.

    Raises:
        FxpipeError: any mistake that the user can fix.
    """
    refuse_moves(options, "here all of them are in one process", "leave out --local")
    with writing(options.out):
        options = resumed_options(options, options.out)
        files = files_read(options)
        plan, checkpoint = check_run(options, from_file=task is None)
        task = task or task_of_run(plan, options)
        if progress is None and options.progress:
            progress = default_progress()
        with threads(options.threads, plan.processes), displayed(progress):
            run = TrainingRun(Agreed(options, plan, task, files, checkpoint), OneProcess(plan, options), progress)
            try:
                summary = run.run()
            except FxpipeError as error:
                if run.recorded is not None and run.recorded.record.pace.steps:
                    name_checkpoint(error, options, options.out)
                raise
    assert summary is not None
    return summary.to_json()


def join(
    options: RunOptions,
    task: Task | None = None,
    progress: Progress | None = None,
    pulse: Pulse | None = None,
    moving: MovingProcess | None = None,
    problem: FxpipeError | None = None,
) -> dict[str, Any] | None:
    """Run the workers of one rank of the process group that the caller has made or the environment describes (RANK,
    WORLD_SIZE, MASTER_ADDR, …).

    If this process was started by `launch`, it has a pulse, which its launcher reads; if it can begin again, `moving`.
    All others learn of its problem, if it refuses.

    Returns:
        The summary (see `RunJson.to_json`) on rank 0, None elsewhere.

    Raises:
        FxpipeError: as `membership`.
    """
    if options.board is None and moving is None and problem is None:
        refuse_moves(options, "these processes have no launcher that can", "`fxpipe run`, with or without torchrun")
    reuse_freed_memory()
    with membership(options, task, pulse, problem) as member, ExitStack() as held:
        if options.progress and progress is None and member.rank == 0:
            progress = default_progress()
        agreed = member.agreed
        world = AmongProcesses(member)
        if progress is not None:
            held.callback(progress.close)
        run = TrainingRun(agreed, world, progress, moving)
        if moving is not None:
            held.enter_context(moving.looking(member.rank, world))
        summary = run.run()
        if moving is not None and summary is not None:
            summary.moves = moving.moves.rows
            summary.write()
        return None if summary is None else summary.to_json()


def join_by_command(options: RunOptions, leave: Callable[[], None] = lambda: None) -> dict[str, Any] | None:
    """The same for a command that torchrun has started in each process, which moves can start again, after `leave`.

    Raises:
        FxpipeError: as `join`; or the options ask for moves that cannot be made.
    """
    refuse_moves(replace(options, rebalance=False), "torchrun has started them", "torchrun --max-restarts N")
    if not options.rebalance:
        return join(options)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        refuse_moves(options, "processes that meet at one of them cannot", "start them by torchrun")
    moving, pulse = MovingProcess(options, leave), Pulse()
    try:
        return join(moving.go_on(), pulse=pulse, moving=moving)
    except Exception as error:
        moving.go_back(error, pulse)
        raise


def open_local(folder: str | Path, task: Task, options: PipelineOptions, out: str | None = None) -> Pipeline:
    """A pipeline with all workers in this process: for debugging, studies of many workers, and a single device.

        pipeline = fxpipe.load("build/").local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
        losses = pipeline.run(data)
        model.load_state_dict(pipeline.state_dict())

    It gives the same bits as one in several processes: the same actions, versions, seeds and memory layouts.

    Raises:
        BuildError: something else writes into the folder for checkpoints.
        FxpipeError: as `Pipeline`.
    """
    with ExitStack() as held:
        if options.checkpoint_every is not None:  # else it only reads there
            held.enter_context(writing(out))
        plan = read_plan(folder)
        options = resumed_options(options, out)
        checkpoint = None if options.weights is None else Checkpoint.open(options.weights, plan)
        world, options, leaves = OneProcess(plan, options), in_steps(options), ExitStack()
        job = Job.of(str(folder), plan, task, options, out, world)
        pipeline = Pipeline(job, checkpoint, leaves)
        leaves.push(held.pop_all())
    return pipeline


def open_joined(options: RunOptions, task: Task) -> Pipeline:
    """A pipeline whose ranks are in processes that all run the user's loop.

    Raises:
        FxpipeError: as `membership` and `Pipeline`.
    """
    reuse_freed_memory()
    with ExitStack() as held:
        member = held.enter_context(membership(options, task))
        agreed = member.agreed
        world = AmongProcesses(member)
        options, leaves = in_steps(agreed.options), ExitStack()
        job = Job.of(options.build, agreed.plan, agreed.task, options, options.out, world)
        pipeline = Pipeline(job, agreed.checkpoint, leaves)
        for executor in pipeline.executors:
            warn_if_edited(*executor.stages)
        check_unchanged(agreed.files)
        barrier()
        member.pulse.phase = "training"
        leaves.push(held.pop_all())
    return pipeline
