"""A pipeline that a user's own loop trains call by call: all workers in this process, or those of one among others."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
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

    Over processes, all make the same calls in the same order; where one does not, all end with an error. Outside a call
    a process computes nothing; others go on as far as they can without it. The process's own random state is left
    alone.

    Args:
        folder: of the build.
        task: its `optimizer` is called once for each worker that trains.
        checkpoint: the weights to start from; None takes the build's, or the model's own.
        out: the folder for checkpoints, if the options ask for some.
        held: what ends with the pipeline.

    Attributes:
        temporary: the build's temporary folder, deleted with the pipeline; None if the build has a lasting one.

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
        beat = world.pulse.after_beat
        world.pulse.after_beat = lambda: self._beat(beat)
        self._given: Iterable[Any] = ()
        self._set_up(checkpoint, opened(options, self.recipe, plan, checkpoint))
        self._before = compare_clocks(options.trace, self.rank, plan.processes)

    def _set_up(
        self, checkpoint: Checkpoint | None, resumed: Resumed | None, shards: list[list[Shard]] | None = None
    ) -> None:
        """Open the workers here, with what is in a checkpoint if there is one; their shards, if they were read."""
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
            batch: where a process `reads`, the same everywhere; others do not look at it.

        Returns:
            Its loss, of which `float(loss)` is the number: a detached float32 scalar where all workers are in this
            process; else `StepLoss`.

        Raises:
            BatchError: the batch does not fit the build; on all workers, and all may go on with another.
            RunError: a stage failed; or the processes do not make the same calls.
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
                    self._tell(REFUSED)
                    raise
            shape = self._tell("step", shape)
            with self._working():
                self._new.hear(shape)
                loss = self._newest = self._rows.step(shape, parts)
            if not self.world.alone:
                return loss
            assert self._rows.losses.newest is not None
            return self._rows.losses.newest

    def flush(self) -> None:
        """Finish the backwards and updates of everything fed; the next step starts with an empty pipeline.

        Replicas that train apart then make an outer step of what they have trained since the last one.
        """
        with self._call("flush"):
            self._flush()

    def run(self, batches: Iterable[Any]) -> list[float]:
        """Run a step for every batch, then a flush; return the losses."""
        losses = [self.step(batch) for batch in batches]
        self.flush()
        return [float(loss) for loss in losses]

    def evaluate(self, batches: Iterable[Any] = ()) -> dict[str, float]:
        """The mean of each of the user's metrics over `batches`, in eval mode, on the weights as they are.

        A batch counts as much as `loss_weight(batch)` says, or, without that hook, as it has samples. A scheduler that
        waits for a metric makes its step, if there were updates since the last.

        Args:
            batches: where a process `reads`, the same everywhere; others do not look at them.

        Raises:
            RunError: minibatches are in flight; or the build has no evaluation; or its code failed.
            BatchError: a batch has a shape that the build was not compiled for.
            TaskError: there is no batch, or those there are weigh nothing; or `loss_weight` failed.
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
                executor.store.updater.evaluated(self.fed, self._evaluation.heard)
            return dict(self._evaluation.heard)

    def save(self, folder: str | Path) -> None:
        """Finish what is in flight, and make a checkpoint: weights, optimizers, schedulers, generators' seeds.

        Its files are those that `fxpipe run --checkpoint-every` writes, and the model's are such as transformers reads.
        A folder that was there before is replaced once the new one is whole. All processes return when it is, and all
        see the folder.

        Raises:
            BuildError, CheckpointError: the disk does not take it.
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
        """Go on from a checkpoint: of `save`, or of a run. Schedule, policy and the like stay those of this pipeline.

        Raises:
            RunError: minibatches are in flight.
            BuildError, CheckpointError: it is none, or does not fit the build.
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

        The pipeline trains no more after that. A `with` that ends without an error does it.
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
                barrier(self.rank)  # who leaves breaks the connections of those who are still on their way here
                self.world.end()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self._closed = True
        self._held.close()

    def set_lr(self, rate: float, *more: float) -> None:
        """Set the learning rates of the minibatches that will be fed from now on: one for all groups, or one for each.

        Updates of those in flight are made with the rates that they were fed under. A scheduler goes on from there, and
        may set others at its next step.

        Raises:
            RunError: there are other groups than rates; or processes set other rates.
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
            TaskError: the hook failed, or may not do what it does.
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
        """Inside, the workers here are expected to move on; `name` is told to the next process."""
        if self._closed:
            raise RunError("the pipeline was closed", hint="make another")
        if self._broken:
            raise RunError("an earlier step failed in the middle", hint="make a new pipeline")
        self._inside = True
        self.world.pulse.move()
        try:
            if name is not None:
                self._tell(name)
            yield
        finally:
            self._inside = False

    def _tell(self, name: str, shape: int | None = None) -> int:
        """See `Calls.make`; after an error in that the workers are not where the others are."""
        try:
            return self._calls.make(name, shape)
        except BatchError:
            raise
        except FxpipeError:
            self._broken = True
            raise

    @contextmanager
    def _working(self) -> Iterator[None]:
        """What fails inside leaves messages under way: there is no going on."""
        self._broken = True
        yield
        self._broken = False

    def _beat(self, after: Callable[[], None]) -> None:
        if not self._inside:  # the user's own code takes as long as it takes
            self.world.pulse.move()
        after()
