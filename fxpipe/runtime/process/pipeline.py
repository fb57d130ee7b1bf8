"""A pipeline that a user's own loop trains call by call: all workers in this process, or those of a rank."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from torch import Tensor

from fxpipe.checkpoint.shard import Shard, replicas_that_write
from fxpipe.errors import BatchError, FxpipeError, RunError
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.spec import Plan
from fxpipe.runtime.options import PipelineOptions, RunOptions
from fxpipe.runtime.process.alike import ALIKE, REFUSED, Calls
from fxpipe.runtime.process.allocator import reuse_freed_memory
from fxpipe.runtime.process.between_actions import between_actions
from fxpipe.runtime.process.check_run import check_evaluation, check_unchanged
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation
from fxpipe.runtime.process.epochs import in_steps
from fxpipe.runtime.process.membership import membership
from fxpipe.runtime.process.minibatch_notes import Losses, StepLoss
from fxpipe.runtime.process.new_shapes import NewShapes
from fxpipe.runtime.process.own_checkpoint import open_checkpoint, write_together
from fxpipe.runtime.process.own_loop import OwnLoop
from fxpipe.runtime.process.resume import Resumed, begin_or_go_on, opened, recipe_of, restore, resumed_options
from fxpipe.runtime.process.rows import Row, first_replicas, open_evaluation, open_rows
from fxpipe.runtime.process.together import agree_on, barrier, gathered
from fxpipe.runtime.process.training_loop import train
from fxpipe.runtime.process.warnings import warn_if_edited
from fxpipe.runtime.process.world import AmongProcesses, OneProcess, World
from fxpipe.runtime.wires.addresses import Addresses
from fxpipe.runtime.worker.averages import averages_of
from fxpipe.runtime.worker.checkpoint import Checkpoint
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import copies
from fxpipe.schedule.action import Event
from fxpipe.stages.minibatch import ShapedMinibatches, number_of
from fxpipe.task.model_file import Task


class Pipeline(OwnLoop):
    """Trains a build call by call.

    Over processes, all make the same calls in the same order; where one does not, all end with an error. Outside a call
    a process computes nothing; others go on as far as they can without it. The process's own random state is left
    alone.

    Args:
        folder: of the build.
        task: its `optimizer` is called once for each worker that trains.
        checkpoint: the weights to start from; None takes the build's, or the model's own.
        out: the folder for checkpoints, if the options ask for some.
        keep_gradients: keep the last update's gradients for `gradients()` (synchronous schedules only).

    Attributes:
        executors: of the workers here, in rising order; of replicas the first here.
        every: those of all replicas here.
        fed: how many minibatches it has had, with those before the checkpoint that it goes on from.
        checkpoints: what saves it; None if it is not to be saved.
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
        keep_gradients: bool = True,
    ) -> None:
        self.folder, self.plan, self.world = Path(folder), plan, world
        self.options = options = in_steps(options)
        self.recipe = recipe_of(plan, options)
        self.device = world.device
        self._task, self._out = task, out
        self.temporary: tempfile.TemporaryDirectory[str] | None = None
        self._synchronous = self.recipe.schedule.synchronous
        self._keep_gradients = keep_gradients and self._synchronous
        self._addresses = Addresses(plan, self.recipe.demand)
        world.open(self._addresses)
        self._new = NewShapes(folder, plan, task.step_hooks, options, self.device, world.exchange, world.pulse)
        self._broken = False
        self._given: Iterable[Any] = ()
        self._set_up(checkpoint, opened(options, self.recipe, plan, checkpoint))

    def _set_up(
        self, checkpoint: Checkpoint | None, resumed: Resumed | None, shards: list[list[Shard]] | None = None
    ) -> None:
        """Open the workers here, with what is in a checkpoint if there is one; their shards, if they were read."""
        plan, world, task, options = self.plan, self.world, self._task, self.options
        world.clear()
        self.fed = 0 if resumed is None else resumed.step
        self._rows = open_rows(
            *(world, plan, str(self.folder), self.recipe, self._addresses, task, options, self.fed, checkpoint),
            keep_gradients=self._keep_gradients,
        )
        self.every = [executor for row in self._rows for executor in row.executors]
        self.executors = first_replicas(self._rows)
        for executor in self.every:
            executor.store.updater.scheduler_due(1)  # now, not at the first update
        self._resumed, self._shards = resumed, list[list[Shard]]()
        if resumed is not None:
            self._shards = restore(self.every, resumed, shards)
        self.data_mark = self._shards[0][0].data if self._shards else None
        self._evaluation: DistributedEvaluation | None = None
        self._newest: StepLoss | None = None
        self._value: Tensor | None = None  # that of the newest loss, where the loss worker is
        self._minibatches: ShapedMinibatches | None = None
        if self._rows[0].rank == 0:
            self._minibatches = ShapedMinibatches(plan, self.folder, self.executors[0].buffers, task.loss_weight)
        self._shapes: dict[int, int] = {}
        for executor in self.every:
            executor.shape_of = self._shapes.__getitem__
        self._new.attach(self.every, self._minibatches)
        self.checkpoints: Checkpoints | None = None
        if options.checkpoint_every is not None:
            write = [e.replica < replicas_that_write(plan, e.worker) or not world.alone for e in self.every]
            writers, own = list(compress(self.every, write)), list(compress(self._shards, write))
            self.checkpoints = Checkpoints(options, plan, self.recipe, self._out, writers, resumed, own, world.exchange)
        self._parts: dict[tuple[int, int], list[Any]] = {}  # by minibatch and replica of worker 0
        self._begun = self._ending = False
        speaks = {executor.worker: executor.transport for executor in self.executors}
        self._losses = Losses(plan, world.line, speaks)
        self._calls = Calls(world.line, speaks[world.line.own])
        self._watched()

    @property
    def metrics(self) -> dict[str, float]:
        return {} if self._newest is None else self._newest.metrics

    @property
    def edited(self) -> list[Path]:
        """Stage files of the workers here that were changed since they were emitted."""
        return [stage.path for e in self.executors for stage in e.stages if stage.edited]

    def step(self, batch: Any = None) -> Tensor | StepLoss:
        """Feed one minibatch, and run the workers here as far as they can go with it.

        With `async`, some backwards of this minibatch, and of those before it, may wait for later steps or `flush`.

        Args:
            batch: on worker 0; others do not look at it.

        Returns:
            Its loss: a detached float32 scalar where all workers are in this process; else `StepLoss`.

        Raises:
            BatchError: the batch does not fit the build; on all workers, and all may go on with another.
            RunError: a stage failed; or the processes do not make the same calls.
            PeerLost: another process is gone.
        """
        with self._call():
            minibatch, shape = self.fed, None
            parts: Sequence[Any] = ()
            if self._minibatches is not None:
                try:
                    shape, parts = self._minibatches(batch, minibatch)
                except FxpipeError:
                    self._tell(REFUSED)
                    raise
            self._shapes[minibatch] = shape = self._tell("step", shape)
            with self._working():
                self._new.hear(shape)
                if not self._begun:
                    self._begin()
                self._share(minibatch, parts)
                self.fed += 1
                loss = self._newest = self._losses.step(minibatch)
                self._go()
            oldest = min(executor.store.version for executor in self.every)
            for old in [known for known in self._shapes if known < oldest]:
                del self._shapes[old]
            if not self.world.alone:
                return loss
            assert self._value is not None
            return self._value

    def flush(self) -> None:
        with self._call("flush"):
            self._flush()

    def evaluate(self, batches: Iterable[Any] = ()) -> dict[str, float]:
        """The mean of each of the user's metrics over `batches`, in eval mode, on the weights as they are.

        A batch counts as much as `loss_weight(batch)` says, or, without that hook, as it has samples. A scheduler that
        waits for a metric makes its step, if there were updates since the last.

        Args:
            batches: on worker 0; others do not look at them.

        Raises:
            RunError: minibatches are in flight; or the build has no evaluation; or its code failed.
            BatchError: a batch has a shape that the build was not compiled for.
            TaskError: there is no batch, or those there are weigh nothing; or `loss_weight` failed.
        """
        self._settled("evaluate")
        check_evaluation(self.plan, "evaluate()")
        with self._call("evaluate"), self._working():
            if self._evaluation is None:
                data = EvaluationData(self.plan, lambda: self._given, self.options.seed, self._task.loss_weight)
                folder, seed = str(self.folder), self.options.seed
                self._evaluation = open_evaluation(
                    self.world, self.plan, folder, self._addresses, self._rows, seed, data
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
        """As `OwnLoop.save`; all processes return when it is whole, and all see the folder."""
        with self._call("save"):
            self._flush()
            self._resumed, self._shards = None, []  # here as where one goes on from it, nothing is in flight
            writers = [e for e in self.every if e.replica < replicas_that_write(self.plan, e.worker)]
            with self._working():
                error = write_together(Path(folder), self.plan, self.recipe, self.options, writers, self.fed, self.rank)
            if error is not None:
                raise error

    def load(self, folder: str | Path) -> None:
        self._settled("load")
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
                for row in self._rows:
                    for transport in row.transports:
                        transport.finish()
                self._set_up(checkpoint, resumed, shards)

    def close(self) -> None:
        self.flush()
        if self.checkpoints is not None:
            self.checkpoints.finish()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all parameters and persistent buffers, under every name the model has for them.

        Over processes, of the parameters that the workers here own: the whole model is never gathered on one worker,
        and `save` writes it.

        Raises:
            RunError: minibatches are in flight, so that workers are at different versions.
        """
        self._settled("state_dict")
        if self.world.alone:
            return copies(self.plan, self.executors)
        owned = {executor.worker: executor.store.parameters for executor in self.executors}
        return {
            name: owned[p.owner][p.name].detach().clone()
            for p in self.plan.parameters
            if p.owner in owned
            for name in p.names
        }

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """The same with the averages of the weights in place of those that are averaged (`ema`, or `averaged`).

        Raises:
            RunError: minibatches are in flight; or the pipeline keeps no averages; or its workers are in several
                processes.
            TaskError: the hook `averaged` failed.
        """
        self._settled("averaged_state_dict")
        if not self.world.alone:
            raise RunError(
                "averaged_state_dict() needs all workers in one process",
                hint="fxpipe.load(BUILD).local(); `fxpipe run --ema` writes ema.safetensors",
            )
        averages = averages_of([executor.store.averages for executor in self.executors])
        if averages is None:
            raise RunError("the pipeline keeps no averages of the weights", hint="build.local(ema=0.999), or averaged=")
        return copies(self.plan, self.executors, averages)

    def gradients(self) -> dict[str, Tensor]:
        """The mean gradient of the last step for every trained parameter of the workers here, under its first name.

        Raises:
            RunError: the schedule is asynchronous: at no moment do all gradients of one step exist.
        """
        if not self._synchronous:
            raise RunError(
                f"schedule '{self.recipe.schedule.name}' has no moment at which all gradients of one step exist",
                hint="use schedule='1f1b' or 'gpipe' to look at gradients",
            )
        return {name: g for e in self.every for name, g in e.store.gradients().items()}

    def staleness(self) -> list[dict[str, Any]]:
        """The means over the run by worker and parameter group (needs `log_staleness`; see `StalenessLog`)."""
        logs = [executor.store.staleness for executor in self.executors]
        return [{"worker": log.worker, **row} for log in logs if log is not None for row in log.summary()]

    @property
    def rank(self) -> int:
        """Which of the processes this is."""
        return self.world.here[0]

    def _begin(self) -> None:
        """Begin with an empty pipeline, or go on with that of the checkpoint."""
        resumed, shards = self._resumed, self._shards
        self._resumed, self._shards = None, []
        self._begun, self._ending = True, False
        for row in self._rows:
            for transport in row.transports:
                transport.begin(self.fed)
        for place, executor in enumerate(self.every):
            executor.reset()
            begin_or_go_on(executor, resumed, shards[place] if shards else [])
        self.world.turns.draws = any(executor.draws for executor in self.every)
        rows = [(row, _Fed(self, self._events(row, resumed), len(row.executors))) for row in self._rows]
        self.world.turns.begin([partial(self._walk, row, fed) for row, fed in rows])

    def _events(self, row: Row, resumed: Resumed | None) -> Iterator[Event]:
        recipe = self.recipe.of_worker(row.executors[0].worker)
        return recipe.schedule.row(row.rank, self.fed) if resumed is None else resumed.row(recipe, row.rank)

    def _walk(self, row: Row, fed: _Fed) -> None:
        """Walk a row until a flush."""
        train(
            self.plan,
            row.executors,
            row.transports,
            fed.next,
            (lambda minibatch: self._parts.pop((minibatch, row.replica))) if row.rank == 0 else None,
            between=lambda version: between_actions(row.executors, self.every, None, self.checkpoints, None, False),
            tell=self._heard if row.replica == 0 or self.plan.outer is None else None,
            more=fed.more,
        )
        for executor, transport in zip(row.executors, row.transports, strict=True):
            executor.store.expect_all()
            transport.drop_weights()
        for transport in row.transports:
            transport.finish()

    def _share(self, minibatch: int, parts: Sequence[Any]) -> None:
        """Give each replica of worker 0 that is here its microbatches."""
        replicas = self.plan.replicas_of(0)
        for row in self._rows:
            if row.rank == 0:
                self._parts[minibatch, row.replica] = list(parts[row.replica :: replicas])
                if replicas > 1 and not self.world.alone:
                    row.executors[0].compare_batch(minibatch, number_of(list(parts)))

    def _heard(self, minibatch: int, loss: Tensor) -> None:
        """The loss worker is here, and says a minibatch's loss; its replicas say the same."""
        if self._losses.tell(minibatch, loss):
            self._value = loss.reshape(-1)[0]

    def _go(self) -> None:
        with self._random_apart(any(executor.draws for executor in self.every)):
            self.world.turns.go()

    def _flush(self) -> None:
        if not self._begun:
            return
        with self._working():
            self._ending = True
            for executor in self.every:
                executor.store.end(self.fed, told=False)
            self._go()
            self._losses.settle()
            for executor in self.every:
                executor.take_buffers(self.fed)
            for executor in self.every:
                executor.begin_meeting()
            for executor in self.every:
                executor.end_meeting()
            for executor in self.every:
                executor.store.flushed()
                executor.store.updater.take_rates(self.fed)
            self._begun = False

    def _reset(self) -> None:
        with self._call("reset"):
            super()._reset()

    def _watched(self) -> None:
        watches = [executor.watch for executor in self.every]
        self.world.pulse.follow(watches, [] if self._evaluation is None else self._evaluation.watches)

    @contextmanager
    def _call(self, name: str | None = None) -> Iterator[None]:
        """Inside, the workers here are expected to move on; `name` is told to the next process."""
        if self._broken:
            raise RunError("an earlier step failed in the middle", hint="make a new pipeline")
        if name is not None:
            self._tell(name)
        yield

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

    @property
    def _in_flight(self) -> bool:
        """The same on all workers, also on those that have made all their updates."""
        if self.world.alone:
            return any(executor.store.version < self.fed for executor in self.every)
        return self._begun and not self._synchronous

    @property
    def _here(self) -> Sequence[Executor]:
        return self.every

    def _agree_on_rates(self, rates: list[float], error: RunError | None) -> None:
        with self._call("set_lr"):
            agree_on(error, self.rank, self.plan.processes)
            given = gathered(rates, self.rank, self.plan.processes)
            if any(others != rates for others in given):
                self._broken = True
                raise RunError(f"the workers set different learning rates: {given}", hint=ALIKE)


class _Fed:
    """A row as far as the pipeline was fed.

    Args:
        workers: how many the row has.
    """

    def __init__(self, pipeline: Pipeline, events: Iterator[Event], workers: int) -> None:
        self._pipeline, self._events, self._workers = pipeline, events, workers
        self._upcoming = next(events)
        self._ended = pipeline.fed * workers  # last backwards that have come out of the row
        self._ends = pipeline.recipe.schedule.ends

    def next(self) -> Event | None:
        """The next event of what was fed; None if there is none yet."""
        pipeline = self._pipeline
        if pipeline._ending:
            while self._ended < pipeline.fed * self._workers and self._upcoming[1].minibatch >= pipeline.fed:
                self._upcoming = next(self._events)
        if self._upcoming[1].minibatch >= pipeline.fed:
            return None
        event, self._upcoming = self._upcoming, next(self._events)
        self._ended += self._ends(event[1])
        return event

    def more(self) -> bool:
        """Wait until something comes, or the pipeline is flushed; whether something comes."""
        pipeline, fed = self._pipeline, self._pipeline.fed
        if not pipeline._ending:
            pipeline.world.turns.wait(
                lambda: pipeline._ending or pipeline.fed > fed, lambda: "the next batch", idle=True
            )
            return True
        return False


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


class JoinedPipeline(Pipeline):
    """A pipeline whose ranks are in processes that all run the user's loop.

    Args:
        options: of the run, without those that `check_own_loop` refuses.
        task: makes the optimizers of the workers of this process.

    Raises:
        FxpipeError: as `membership` and `Pipeline`.
    """

    def __init__(self, options: RunOptions, task: Task) -> None:
        self._held = ExitStack()
        self._closed = self._inside = False
        reuse_freed_memory()
        with self._held:
            member = self._held.enter_context(membership(options, task))
            agreed, pulse = member.agreed, member.pulse
            beat = pulse.after_beat
            pulse.after_beat = lambda: self._beat(beat)
            world = AmongProcesses(agreed.plan, agreed.options, member.rank, pulse, member.pulses)
            super().__init__(
                options.build, agreed.plan, agreed.task, agreed.options, world, agreed.checkpoint, keep_gradients=False
            )
            for executor in self.executors:
                warn_if_edited(*executor.stages)
            check_unchanged(agreed.files)
            barrier(self.rank)
            pulse.phase = "training"
            self._held = self._held.pop_all()

    def close(self) -> None:
        if self._closed:
            return
        try:
            with self._call("close"):
                self._flush()
                for row in self._rows:
                    for transport in row.transports:
                        transport.finish()
                barrier(self.rank)  # who leaves breaks the connections of those who are still on their way here
                self.world.end()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self._closed = True
        self._held.close()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if error is not None and not self._closed:
            self._closed = True
            self._held.__exit__(kind, error, traceback)

    @contextmanager
    def _call(self, name: str | None = None) -> Iterator[None]:
        if self._closed:
            raise RunError("the pipeline was closed", hint="fxpipe.join(...) makes another")
        self._inside = True
        self.world.pulse.move()
        try:
            with super()._call(name):
                yield
        finally:
            self._inside = False

    def _beat(self, after: Callable[[], None]) -> None:
        if not self._inside:  # the user's own code takes as long as it takes
            self.world.pulse.move()
        after()
