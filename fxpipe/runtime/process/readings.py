"""What a user's own loop reads of a pipeline between two calls, and how the pipeline is saved and loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from fxpipe.checkpoint.manifest import FileEntry
from fxpipe.checkpoint.shard import complete, write_shard
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.checkpoint.tree import said
from fxpipe.errors import CheckpointError, FxpipeError, PeerLost, RunError
from fxpipe.files import replacing
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.resume import Resumed, about_run, opened
from fxpipe.runtime.process.rows import FedRows
from fxpipe.runtime.process.world import World
from fxpipe.runtime.wires.exchange import agree_on, agreed_error, gathered, of_worker_0
from fxpipe.runtime.worker.averages import averages_of
from fxpipe.runtime.worker.captures import shard_at_rest
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import copies


class Readings:
    """The part of a pipeline that reads the workers in this process.

    Attributes:
        fed: how many minibatches it has had, including those before the checkpoint that it goes on from.
        executors: of the workers here, in rising order; only the first replica here of each.
    """

    plan: Plan
    recipe: Recipe
    world: World
    _rows: FedRows

    @property
    def fed(self) -> int:
        return self._rows.fed

    @property
    def executors(self) -> list[Executor]:
        return self._rows.executors

    @property
    def every(self) -> list[Executor]:
        """The executors of all replicas here."""
        return self._rows.every

    @property
    def resumed(self) -> Resumed | None:
        """The checkpoint that it went on from; None if it began anew."""
        return self._rows.resumed

    @property
    def checkpoints(self) -> Checkpoints | None:
        """What saves it as the options ask; None if they ask for no checkpoints."""
        return self._rows.checkpoints

    @property
    def edited(self) -> list[Path]:
        """Stage files of the workers here that were changed since they were emitted."""
        return [stage.path for e in self.executors for stage in e.stages if stage.edited]

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all parameters and persistent buffers, under every name the model has for them.

        With several processes, only what the workers here own: the whole model is never gathered on one worker; `save`
        writes it.

        Raises:
            RunError: minibatches are in flight, so that workers are at different versions.
        """
        self._settled("state_dict")
        return self._copies([executor.store.parameters for executor in self.executors])

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """The same with averages in place of the weights that are averaged (`ema`, or `averaged`).

        Raises:
            RunError: minibatches are in flight; or the pipeline keeps no averages.
            TaskError: the hook `averaged` failed.
        """
        self._settled("averaged_state_dict")
        averages = averages_of([executor.store.averages for executor in self.executors])
        if averages is None:
            raise RunError("the pipeline keeps no averages of the weights", hint="build.local(ema=0.999), or averaged=")
        own = zip(self.executors, averages, strict=True)
        return self._copies([{**executor.store.parameters, **found} for executor, found in own])

    def gradients(self) -> dict[str, Tensor]:
        """The mean gradient of the last step for every trained parameter, under its first name.

        Raises:
            RunError: the schedule is asynchronous, so the gradients of one step never exist together; or there are
                other processes.
        """
        if not self.recipe.schedule.synchronous:
            raise RunError(
                f"with schedule '{self.recipe.schedule.name}' the gradients of one step never exist together",
                hint="use a schedule with a flush, such as 1f1b",
            )
        if not self.world.alone:
            raise RunError(
                "with several processes, gradients are freed right after the update",
                hint="fxpipe.load(BUILD).local(...).gradients(); gradient_norm is known everywhere with clip_norm",
            )
        return {name: value for executor in self.executors for name, value in executor.store.gradients().items()}

    def staleness(self) -> list[dict[str, Any]]:
        """The means over the run by worker and parameter group (needs `log_staleness`; see `StalenessLog`)."""
        logs = [executor.store.staleness for executor in self.executors]
        return [{"worker": log.worker, **row} for log in logs if log is not None for row in log.summary()]

    @property
    def learning_rates(self) -> list[float]:
        """The rates of the next update, by group, of the first worker here that trains something; else empty.

        With several processes, one whose workers train nothing has none: decide by numbers of your own script.
        """
        return next((rates for e in self.executors if (rates := e.store.updater.rates)), [])

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all workers' gradients at the last update of the first worker here; None without `clip_norm`."""
        return self.executors[0].store.updater.norm

    @property
    def loss_scale(self) -> float | None:
        """The factor of the next minibatch's loss; None unless the build was compiled with `--autocast fp16`.

        It is what the first worker here knows: with several processes, all know the same after `flush`.
        """
        scaler = self.executors[0].scaler
        return None if scaler is None else scaler.scale.value

    @property
    def skipped_steps(self) -> int:
        """How many steps made no update because gradients overflowed; 0 without loss scaling. See `loss_scale`."""
        scaler = self.executors[0].scaler
        return 0 if scaler is None else scaler.scale.skipped

    def _copies(self, parameters: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Copies of these values of each worker's parameters, under the model's names."""
        if self.world.alone:
            return copies(self.plan, self.executors, parameters)
        owned = {executor.worker: own for executor, own in zip(self.executors, parameters, strict=True)}
        return {
            name: owned[p.owner][p.name].detach().clone()
            for p in self.plan.parameters
            if p.owner in owned
            for name in p.names
        }

    def _settled(self, what: str) -> None:
        """Refuse a call while minibatches are in flight, also on workers that have made all updates."""
        in_flight = self._rows.begun and not self.recipe.schedule.synchronous
        if self.world.alone:
            in_flight = any(executor.store.version < self.fed for executor in self.every)
        if in_flight:
            raise RunError(f"{what}() was called while minibatches are in flight", hint="call flush() first")


Written = dict[str, FileEntry]


def write_own(folder: Path, plan: Plan, executor: Executor) -> Written:
    """Write the files of a replica of a worker as a run's checkpoint has them, so that a run can go on from it.

    Raises:
        CheckpointError: they cannot be written, or the optimizer's state holds objects other than plain values.
    """
    try:
        return write_shard(folder, plan, executor.worker, shard_at_rest(executor), executor.replica)
    except Exception as error:  # of the user's objects, too: the other workers must learn of it
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
    """Make a checkpoint: worker 0's process makes the folder, all write, worker 0's process completes it.

    Args:
        executors: those here that have something to write.
        rank: of this process.

    Returns:
        The error that all should raise; None if the checkpoint was written.
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
    """Open a checkpoint that a loop goes on from; the loop keeps its options.

    Raises:
        BuildError: it does not fit the plan.
        CheckpointError: it is no checkpoint of fxpipe, or was changed.
    """
    checkpoint = Checkpoint.open(folder, plan)
    if checkpoint.manifest is None:
        raise CheckpointError(
            f"{folder} has weights, but no training state",
            hint="to start from weights, make the pipeline with weights=...",
        )
    there = dataclasses.replace(options, resume=str(folder), weights=str(folder))
    resumed = opened(there, recipe, plan, checkpoint)
    assert resumed is not None
    return checkpoint, resumed
