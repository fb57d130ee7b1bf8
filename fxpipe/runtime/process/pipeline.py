"""A pipeline that a user's own loop trains call by call: with all workers in this process, or in several processes."""

from __future__ import annotations

import sys
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from fxpipe.checkpoint.shard import Shard
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.errors import FxpipeError, PeerLost, RunError
from fxpipe.options import taken
from fxpipe.plan.plan import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.check_run import check_evaluation
from fxpipe.runtime.process.checkpoints import Checkpoints, write_together
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation
from fxpipe.runtime.process.losses import StepLoss
from fxpipe.runtime.process.minibatch_notes import ALIKE, REFUSED
from fxpipe.runtime.process.new_shapes import NewShapes
from fxpipe.runtime.process.own_loop import FedRows, LoopCalls
from fxpipe.runtime.process.resume import Resumed, open_checkpoint, opened
from fxpipe.runtime.process.timelines import collect_trace, compare_clocks, recorded
from fxpipe.runtime.process.what_trains import WhatTrains
from fxpipe.runtime.process.world import Job, World
from fxpipe.runtime.wires.exchange import agreeing, barrier, gathered
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import averages_of, copies
from fxpipe.runtime.worker.loss_scaler import LossScaler
from fxpipe.runtime.worker.staleness import StalenessLog

LOOP = "code between the steps"


class Pipeline:
    """Trains a build call by call.

        with fxpipe.join("build/", optimizer=make_optimizer) as pipeline:  # or fxpipe.load("build/").local(...)
            for epoch in range(5):
                for batch in data:
                    loss = pipeline.step(batch)
                pipeline.flush()
                metrics = pipeline.evaluate(held_out)
                if metrics["loss"] > worst:
                    rate = 0.1 * rate
                    pipeline.set_lr(rate)
                pipeline.save("last/")

    With several processes, all must make the same calls in the same order, else all end with an error. Outside a call
    a process computes nothing; others go on as far as they can without it. The process's own random state does not
    change.

    It is freed, with its workers, when nothing refers to it.

    Args:
        checkpoint: the weights to start from; None takes the build's, or the model's own.
        held: closed with the pipeline.

    Attributes:
        job: the build, the options, where the workers are.
        temporary: the build's temporary folder, deleted with the pipeline; None if the folder is the user's.

    Raises:
        FxpipeError: as `FedRows`.
    """

    def __init__(self, job: Job[PipelineOptions], checkpoint: Checkpoint | None, held: ExitStack) -> None:
        self.job, self._held = job, held
        plan, options, world = job.plan, job.options, job.world
        world.open(job.addresses)
        self.temporary: tempfile.TemporaryDirectory[str] | None = None
        self._new = NewShapes(job.folder, plan, job.task.step_hooks, options, world.device, world.board, world.pulse)
        self._free = weakref.finalize(self, _free, world)  # no row and no thread may refer to the pipeline
        self._calls = LoopCalls(world.pulse)
        self._given: list[Iterable[Any]] = []
        self._set_up(checkpoint, opened(options, job.recipe, plan, checkpoint))
        self._before = compare_clocks(options.trace)

    def _set_up(
        self, checkpoint: Checkpoint | None, resumed: Resumed | None, shards: list[list[Shard]] | None = None
    ) -> None:
        """Open the workers here, from a checkpoint if there is one, whose shards may have been read."""
        job = self.job
        job.world.clear()
        self._rows = FedRows(job, checkpoint, resumed, shards)
        self._evaluation: DistributedEvaluation | None = None
        self._minibatches = self._rows.rows.minibatches()
        self._new.attach(self.every, self._minibatches)
        self._calls.compare(job.world.line, self.executors)
        for executor in self.every if job.options.trace is not None else ():
            executor.watch.record()
            executor.watch.begin()
        self._trains = WhatTrains(job.plan, job.task, self.every)
        self._watched()

    @property
    def rank(self) -> int:
        """Which of the processes this is."""
        return self.job.process

    @property
    def plan(self) -> Plan:
        """Of the build."""
        return self.job.plan

    @property
    def recipe(self) -> Recipe:
        """Its schedule and its policy."""
        return self.job.recipe

    @property
    def reads(self) -> bool:
        """Whether this process looks at batches: it has the first worker, or a replica of it."""
        return self._minibatches is not None

    @property
    def fed(self) -> int:
        """How many minibatches it has had, including those before the checkpoint that it goes on from."""
        return self._rows.fed

    @property
    def executors(self) -> list[Executor]:
        """Of the workers here, in rising order; only the first replica here of each."""
        return self._rows.rows.executors

    @property
    def every(self) -> list[Executor]:
        """The executors of all replicas here."""
        return self._rows.rows.every

    @property
    def resumed(self) -> Resumed | None:
        """The checkpoint that it went on from; None if it began anew."""
        return self._rows.rows.resumed

    @property
    def checkpoints(self) -> Checkpoints | None:
        """What saves it as the options ask; None if they ask for no checkpoints."""
        return self._rows.checkpoints

    @property
    def edited(self) -> list[Path]:
        """Stage files of the workers here that were changed since they were emitted."""
        return [stage.path for e in self.executors for stage in e.stages if stage.edited]

    @property
    def metrics(self) -> dict[str, float]:
        """What `loss(model, batch)` returned next to the loss of the newest minibatch; empty before the first."""
        return {} if self._rows.newest is None else self._rows.newest.metrics

    def step(self, batch: Any = None) -> Tensor | StepLoss:
        """Feed one minibatch, and run the workers here as far as they can go with it.

        With `async`, some backwards of this minibatch, and of those before it, may wait for later steps or `flush`.

        Args:
            batch: the same in all processes that `reads`; others ignore it.

        Returns:
            Its loss, with `float(loss)` as the number: a detached float32 scalar where all workers are in this
            process; else `StepLoss`.

        Raises:
            BatchError: the batch does not fit the build; raised on all workers, and all may go on with another.
            RunError: a stage failed; or the processes make different calls.
            PeerLost: another process is gone.
            TaskError: parameters were frozen or thawed.
        """
        self._trains.check(LOOP)
        with self._calls.call():
            shape: int | None = None
            parts: list[tuple[Any, ...]] = []
            if self._minibatches is not None:
                try:
                    shape, parts = self._minibatches(batch, self.fed)
                except FxpipeError:
                    self._calls.announce(REFUSED)
                    raise
            shape = self._calls.announce("step", shape)
            with self._calls.working():
                self._new.prepare(shape)
                loss = self._rows.step(shape, parts)
            if not self.job.world.alone:
                return loss
            assert self._rows.rows.losses.newest is not None
            return self._rows.rows.losses.newest

    def flush(self) -> None:
        """Finish the backwards and updates of everything fed; the next step starts with an empty pipeline.

        Replicas that train separately then make an outer step of what they have trained since the last one.
        """
        with self._calls.call("flush"):
            self._flush()

    def run(self, batches: Iterable[Any]) -> list[float]:
        """Run a step for every batch, then a flush; return the losses.

        Raises:
            RunError: these are no batches; or as `step`.
        """
        try:
            each = iter(batches)
        except TypeError as error:
            raise RunError(f"run() trains on batches: {error}", hint="run(data), or run(list(data)[:5])") from error
        losses = [self.step(batch) for batch in each]
        self.flush()
        return [float(loss) for loss in losses]

    def evaluate(self, batches: Iterable[Any] = ()) -> dict[str, float]:
        """The mean of each of the user's metrics over `batches`, in eval mode, with the current weights.

        A batch counts by `loss_weight(batch)`, or, without that hook, by its number of samples. A scheduler that
        needs a metric makes its step, if there were updates since its last.

        Args:
            batches: the same in all processes that `reads`; others ignore them.

        Raises:
            RunError: minibatches are in flight; or the build has no evaluation; or its code failed.
            BatchError: a batch has a shape that the build was not compiled for.
            TaskError: there is no batch, or the batches weigh nothing; or `loss_weight` failed.
        """
        self._settled("evaluate")
        check_evaluation(self.plan, "evaluate()")
        with self._calls.call("evaluate"), self._calls.working():
            if self._evaluation is None:
                data = EvaluationData(self.plan, self._given.pop, self.job.options.seed, self.job.task)
                self._evaluation = self._rows.rows.evaluation(data)
                self._watched()
            self._given[:] = [batches]
            self.job.world.pulse.phase = "evaluating"
            metrics = self._evaluation.run([executor.state(self.fed) for executor in self.executors])
            self.job.world.pulse.phase = "training"
            self._given.clear()
            for executor in self.every:
                executor.store.updater.scheduler.evaluated(self.fed, metrics)
            return metrics

    def save(self, folder: str | Path) -> None:
        """Finish what is in flight, and make a checkpoint: weights, optimizers, schedulers, generators' seeds.

        Its files are those that `fxpipe run --checkpoint-every` writes; transformers can read the model's files.
        An earlier checkpoint is replaced once the new one is whole. Then all processes return, and all see the folder.

        Raises:
            BuildError, CheckpointError: the checkpoint cannot be written; or the folder holds other files.
        """
        folder = Path(taken("folder", folder, str))
        with self._calls.call("save"):
            self._flush()
            self._rows.rows.forget_checkpoint()
            failure: FxpipeError | None = None
            with self._calls.working():
                try:
                    write_together(folder, self.job, self.every, self.fed)
                except PeerLost:
                    raise
                except FxpipeError as error:  # all may go on
                    failure = error
            if failure is not None:
                raise failure

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint: of `save`, or of a run. This pipeline keeps its schedule, policy and so on.

        Raises:
            RunError: minibatches are in flight.
            BuildError, CheckpointError: it is no checkpoint, or does not fit the build.
        """
        folder = taken("folder", folder, str)
        self._settled("load")
        self._trains.check(LOOP)
        with self._calls.call("load"):
            self._flush()
            with agreeing():
                checkpoint, resumed = open_checkpoint(folder, self.job.options, self.job.recipe, self.plan)
                shards = [resumed.shards(executor.worker, executor.replica) for executor in self.every]
            with self._calls.working():
                self._rows.rows.finish()
                if self.checkpoints is not None:
                    self.checkpoints.finish()
                self._set_up(checkpoint, resumed, shards)

    def close(self) -> None:
        """Finish what is in flight, and the checkpoints and the trace that the options ask for.

        The pipeline cannot train after that. A `with` that ends without an error calls this.
        """
        if self._calls.state == "closed":
            return
        try:
            with self._calls.call("close"):
                self._flush()
                if self.checkpoints is not None:
                    self.checkpoints.finish()
                self._rows.rows.finish()
                self._write_trace()
                barrier()  # a process that leaves breaks the connections of those that have not arrived here
                self.job.world.end()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self._calls.state = "closed"
        self._free()
        self._held.close()

    def set_lr(self, rate: float, *more: float) -> None:
        """Set the learning rates of the minibatches that will be fed from now on: one for all groups, or one for each.

        Minibatches in flight keep the rates that they were fed with. A scheduler goes on from the new rates, and may
        set others at its next step.

        Raises:
            RunError: the number of rates is not that of the groups; or processes set different rates.
        """
        rates = [taken("rate", one, float) for one in (rate, *more)]
        with self._calls.call("set_lr"):
            with agreeing():
                for executor in self.every:
                    executor.store.updater.check_rates(rates)
            everywhere = gathered(rates)
            if any(others != rates for others in everywhere):
                self._calls.state = "broken"
                raise RunError(f"the workers set different learning rates: {everywhere}", hint=ALIKE)
            for executor in self.every:
                executor.store.updater.set_rates(self.fed, rates, executor.store.version)

    def reset(self) -> None:
        """Call the hook `reset(model)`: an epoch of your own begins.

        Raises:
            RunError: minibatches are in flight, or there is no such hook.
            TaskError: the hook failed, or does what it may not do.
        """
        self._settled("reset")
        if not any(executor.resets is not None for executor in self.executors):
            raise RunError(
                "reset() needs the hook reset(model), and there is none",
                hint="define it in the model file; in Python, give reset=",
            )
        with self._calls.call("reset"):
            for executor in self.every:
                if executor.resets is not None:
                    executor.resets(executor.buffers, self.fed)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all parameters and saved buffers, under the names that the model's `state_dict()` has for them.

        With several processes, only what the workers here own: the whole model is never gathered on one worker; `save`
        writes it.

        Raises:
            RunError: minibatches are in flight, so that workers are at different versions.
        """
        self._settled("state_dict")
        return copies(self.plan, self.executors, [executor.store.parameters for executor in self.executors])

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """The same with averages in place of the weights that are averaged (`ema`, or `averaged`).

        Raises:
            RunError: minibatches are in flight; or the pipeline keeps no averages.
            TaskError: the hook `averaged` failed.
        """
        self._settled("averaged_state_dict")
        averages = averages_of(self.executors)
        if averages is None:
            raise RunError("the pipeline keeps no averages of the weights", hint="build.local(ema=0.999), or averaged=")
        pairs = zip(self.executors, averages, strict=True)
        weights = [{**executor.store.parameters, **averaged} for executor, averaged in pairs]
        return copies(self.plan, self.executors, weights)

    def gradients(self) -> dict[str, Tensor]:
        """The mean gradient of the last step for every trained parameter, under its first name.

        Raises:
            RunError: the schedule is asynchronous, so the gradients of one step never exist together; or there are
                other processes.
        """
        if not self.job.recipe.schedule.synchronous:
            raise RunError(
                f"with schedule '{self.job.recipe.schedule.name}' the gradients of one step never exist together",
                hint="use a schedule with a flush, such as 1f1b",
            )
        if not self.job.world.alone:
            raise RunError(
                "with several processes, gradients are freed right after the update",
                hint="fxpipe.load(BUILD).local(...).gradients(); gradient_norm is known everywhere with clip_norm",
            )
        return {name: value for executor in self.executors for name, value in executor.store.gradients().items()}

    def staleness(self) -> list[dict[str, Any]]:
        """The means over the run by worker and parameter group (needs `log_staleness`; see `StalenessLog`)."""
        logs = [executor.store.part(StalenessLog) for executor in self.executors]
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
        return self.executors[0].store.norm

    @property
    def loss_scale(self) -> float | None:
        """The factor of the next minibatch's loss; None unless the build was compiled with `--autocast fp16`.

        It is what the first worker here knows: with several processes, all know the same after `flush`.
        """
        scaler = self.executors[0].store.part(LossScaler)
        return None if scaler is None else scaler.scale.value

    @property
    def skipped_steps(self) -> int:
        """How many steps made no update because gradients overflowed; 0 without loss scaling. See `loss_scale`."""
        scaler = self.executors[0].store.part(LossScaler)
        return 0 if scaler is None else scaler.scale.skipped

    def _settled(self, what: str) -> None:
        """Refuse a call while minibatches are in flight, also on workers that have made all updates."""
        in_flight = self._rows.begun and not self.job.recipe.schedule.synchronous
        if self.job.world.alone:
            in_flight = any(executor.store.version < self.fed for executor in self.every)
        if in_flight:
            raise RunError(f"{what}() was called while minibatches are in flight", hint="call flush() first")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        elif self._calls.state != "closed":
            self._calls.state = "closed"
            if self.checkpoints is not None:
                self.checkpoints.abandon()
            self._free()
            self._held.__exit__(kind, error, traceback)

    def _flush(self) -> None:
        if self._rows.begun:
            with self._calls.working():
                self._rows.flush()

    def _write_trace(self) -> None:
        path, plan = self.job.options.trace, self.plan
        if path is None:
            return
        for executor in self.every:
            executor.watch.end()
        traces = recorded(self.every, self._before, compare_clocks(path))
        collect_trace(path, self.rank, plan, self.job.recipe, traces, self.every[0].watch.elapsed)

    def _watched(self) -> None:
        watches = [executor.watch for executor in self.every]
        self.job.world.pulse.follow(watches, [] if self._evaluation is None else self._evaluation.watches)


def _free(world: World) -> None:
    """Rows that wait refer to their workers (see `Turns`)."""
    world.turns.end()
    world.clear()
