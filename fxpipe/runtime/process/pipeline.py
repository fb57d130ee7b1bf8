"""A pipeline that a user's own loop trains call by call: with all workers in this process, or in several processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from fxpipe.checkpoint.shard import Shard, replicas_that_write
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.errors import BatchError, FxpipeError, RunError
from fxpipe.plan.spec import Plan
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.check_run import check_evaluation
from fxpipe.runtime.process.collect_trace import collect_trace, compare_clocks, recorded
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation
from fxpipe.runtime.process.minibatch_notes import ALIKE, REFUSED, Calls, StepLoss
from fxpipe.runtime.process.new_shapes import NewShapes
from fxpipe.runtime.process.readings import Readings, open_checkpoint, write_together
from fxpipe.runtime.process.resume import Resumed, opened, recipe_of
from fxpipe.runtime.process.rows import FedRows, open_evaluation, open_rows
from fxpipe.runtime.process.what_trains import WhatTrains
from fxpipe.runtime.process.world import World
from fxpipe.runtime.wires.addresses import Addresses
from fxpipe.runtime.wires.exchange import agree_on, barrier, gathered
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.feed import in_steps
from fxpipe.stages.minibatch import ShapedMinibatches
from fxpipe.task.model_file import Task

LOOP = "code between the steps"


class Pipeline(Readings):
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

    Args:
        folder: of the build.
        task: its `optimizer` is called once for each worker that trains.
        checkpoint: the weights to start from; None takes the build's, or the model's own.
        out: the folder for checkpoints, if the options ask for some.
        held: closed with the pipeline.

    Attributes:
        temporary: the build's temporary folder, deleted with the pipeline; None if the folder is the user's.

    Raises:
        BuildError, BackendError, ScheduleError, PolicyError: as `open_worker` and `recipe_of`.
    """

    def __init__(
        self,
        folder: str | Path,
        plan: Plan,
        task: Task,
        options: PipelineOptions,
        world: World,
        checkpoint: Checkpoint | None,
        out: str | None = None,
        held: ExitStack | None = None,
    ) -> None:
        self.folder, self.plan, self.world = Path(folder), plan, world
        self.options = options = in_steps(options)
        self.recipe = recipe_of(plan, options)
        self.device = world.device
        self._task, self._out, self._held = task, out, held or ExitStack()
        self.temporary: tempfile.TemporaryDirectory[str] | None = None
        self._addresses = Addresses(plan, self.recipe.demand)
        world.open(self._addresses)
        self._new = NewShapes(folder, plan, task.step_hooks, options, self.device, world.exchange, world.pulse)
        self._closed = self._inside = self._broken = False
        world.pulse.after_beat.insert(0, self._beat)
        self._given: Iterable[Any] = ()
        self._set_up(checkpoint, opened(options, self.recipe, plan, checkpoint))
        self._before = compare_clocks(options.trace, self.rank, plan.processes)

    def _set_up(
        self, checkpoint: Checkpoint | None, resumed: Resumed | None, shards: list[list[Shard]] | None = None
    ) -> None:
        """Open the workers here, from a checkpoint if there is one; return their shards, if they were read."""
        plan, world, options = self.plan, self.world, self.options
        world.clear()
        step = 0 if resumed is None else resumed.step
        rows = open_rows(
            *(world, plan, str(self.folder), self.recipe, self._addresses, self._task, options, step, checkpoint),
            keep_gradients=world.alone and self.recipe.schedule.synchronous,
        )
        self._rows = FedRows(rows, world, plan, self.recipe, options, self._out, resumed, shards)
        self._evaluation: DistributedEvaluation | None = None
        self._newest: StepLoss | None = None
        self._minibatches: ShapedMinibatches | None = None
        if rows[0].rank == 0:
            self._minibatches = ShapedMinibatches(plan, self.folder, self.executors[0].buffers, self._task.loss_weight)
        self._new.attach(self.every, self._minibatches)
        self._calls = Calls(world.line, self.executors)
        for executor in self.every if options.trace is not None else ():
            executor.watch.record()
            executor.watch.begin()
        self._trains = WhatTrains(plan, self._task, self.every)
        self._watched()

    @property
    def rank(self) -> int:
        """Which of the processes this is."""
        return self.world.here[0]

    @property
    def reads(self) -> bool:
        """Whether this process looks at batches: it has the first worker, or a replica of it."""
        return self._minibatches is not None

    @property
    def metrics(self) -> dict[str, float]:
        """What `loss(model, batch)` returned next to the loss of the newest minibatch; empty before the first."""
        return {} if self._newest is None else self._newest.metrics

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
        with self._call():
            shape: int | None = None
            parts: list[tuple[Any, ...]] = []
            if self._minibatches is not None:
                try:
                    shape, parts = self._minibatches(batch, self.fed)
                except FxpipeError:
                    self._announce(REFUSED)
                    raise
            shape = self._announce("step", shape)
            with self._working():
                self._new.prepare(shape)
                loss = self._newest = self._rows.step(shape, parts)
            if not self.world.alone:
                return loss
            assert self._rows.losses.newest is not None
            return self._rows.losses.newest

    def flush(self) -> None:
        """Finish the backwards and updates of everything fed; the next step starts with an empty pipeline.

        Replicas that train separately then make an outer step of what they have trained since the last one.
        """
        with self._call("flush"):
            self._flush()

    def run(self, batches: Iterable[Any]) -> list[float]:
        """Run a step for every batch, then a flush; return the losses."""
        losses = [self.step(batch) for batch in batches]
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
        with self._call("evaluate"), self._working():
            if self._evaluation is None:
                data = EvaluationData(self.plan, lambda: self._given, self.options.seed, self._task)
                folder, seed = str(self.folder), self.options.seed
                self._evaluation = open_evaluation(
                    self.world, self.plan, folder, self._addresses, self._rows.rows, seed, data
                )
                self._watched()
            self._given = batches
            self.world.pulse.phase = "evaluating"
            self._evaluation.run([executor.state(self.fed) for executor in self.executors])
            self.world.pulse.phase = "training"
            self._given = ()
            for executor in self.every:
                executor.store.updater.evaluated(self.fed, self._evaluation.newest)
            return dict(self._evaluation.newest)

    def save(self, folder: str | Path) -> None:
        """Finish what is in flight, and make a checkpoint: weights, optimizers, schedulers, generators' seeds.

        Its files are those that `fxpipe run --checkpoint-every` writes; transformers can read the model's files.
        An earlier folder is replaced once the new one is whole. Then all processes return, and all see the folder.

        Raises:
            BuildError, CheckpointError: the checkpoint cannot be written.
        """
        with self._call("save"):
            self._flush()
            self._rows.forget_checkpoint()
            writers = [e for e in self.every if e.replica < replicas_that_write(self.plan, e.worker)]
            with self._working():
                error = write_together(Path(folder), self.plan, self.recipe, self.options, writers, self.fed, self.rank)
            if error is not None:
                raise error

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint: of `save`, or of a run. This pipeline keeps its schedule, policy and so on.

        Raises:
            RunError: minibatches are in flight.
            BuildError, CheckpointError: it is no checkpoint, or does not fit the build.
        """
        self._settled("load")
        self._trains.check(LOOP)
        with self._call("load"):
            self._flush()
            error: FxpipeError | None = None
            try:
                checkpoint, resumed = open_checkpoint(folder, self.plan, self.recipe, self.options)
                shards = [resumed.shards(executor.worker, executor.replica) for executor in self.every]
            except FxpipeError as met:
                error = met
            agree_on(error, self.rank, self.plan.processes)
            with self._working():
                self._rows.finish()
                if self.checkpoints is not None:
                    self.checkpoints.finish()
                self._set_up(checkpoint, resumed, shards)

    def close(self) -> None:
        """Finish what is in flight, and the checkpoints and the trace that the options ask for.

        The pipeline cannot train after that. A `with` that ends without an error calls this.
        """
        if self._closed:
            return
        try:
            with self._call("close"):
                self._flush()
                if self.checkpoints is not None:
                    self.checkpoints.finish()
                self._rows.finish()
                self._write_trace()
                barrier(self.rank)  # a process that leaves breaks the connections of those that have not arrived here
                self.world.end()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self._closed = True
        self._held.close()

    def set_lr(self, rate: float, *more: float) -> None:
        """Set the learning rates of the minibatches that will be fed from now on: one for all groups, or one for each.

        Minibatches in flight keep the rates that they were fed with. A scheduler goes on from the new rates, and may
        set others at its next step.

        Raises:
            RunError: the number of rates is not that of the groups; or processes set different rates.
        """
        rates = [rate, *more]
        unfit = (executor.store.updater.unfit(rates) for executor in self.every)
        error = next((found for found in unfit if found is not None), None)
        with self._call("set_lr"):
            agree_on(error, self.rank, self.plan.processes)
            given = gathered(rates, self.rank, self.plan.processes)
            if any(others != rates for others in given):
                self._broken = True
                raise RunError(f"the workers set different learning rates: {given}", hint=ALIKE)
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
        with self._call("reset"):
            for executor in self.every:
                if executor.resets is not None:
                    executor.resets(executor.buffers, self.fed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            if self.checkpoints is not None:
                self.checkpoints.abandon()
            self._held.__exit__(kind, error, traceback)

    def _flush(self) -> None:
        if self._rows.begun:
            with self._working():
                self._rows.flush()

    def _write_trace(self) -> None:
        path, plan = self.options.trace, self.plan
        if path is None:
            return
        for executor in self.every:
            executor.watch.end()
        traces = recorded(self.every, self._before, compare_clocks(path, self.rank, plan.processes))
        collect_trace(path, self.rank, plan, self.recipe, traces, self.every[0].watch.elapsed)

    def _watched(self) -> None:
        watches = [executor.watch for executor in self.every]
        self.world.pulse.follow(watches, [] if self._evaluation is None else self._evaluation.watches)

    @contextmanager
    def _call(self, name: str | None = None) -> Iterator[None]:
        """Inside, the workers here are expected to move on; `name` is sent to the next process."""
        if self._closed:
            raise RunError("the pipeline was closed", hint="make a new one")
        if self._broken:
            raise RunError("an earlier step failed in the middle", hint="make a new pipeline")
        self._inside = True
        self.world.pulse.move()
        try:
            if name is not None:
                self._announce(name)
            yield
        finally:
            self._inside = False

    def _announce(self, name: str, shape: int | None = None) -> int:
        """See `Calls.make`; after an error in it the workers here and elsewhere are at different points."""
        try:
            return self._calls.make(name, shape)
        except BatchError:
            raise
        except FxpipeError:
            self._broken = True
            raise

    @contextmanager
    def _working(self) -> Iterator[None]:
        """An error inside leaves messages in flight: the pipeline cannot go on."""
        self._broken = True
        yield
        self._broken = False

    def _beat(self) -> None:
        if not self._inside:  # the user's own code may take any time
            self.world.pulse.move()
