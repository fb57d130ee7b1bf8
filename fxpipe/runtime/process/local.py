"""All workers of a pipeline in one process: for debugging, studies of many workers, and a single device.

Gives the same bits as the distributed run: the same actions, versions, seeds and memory layouts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.files import replacing
from fxpipe.observe.record import OnStep
from fxpipe.plan.build_folder import read_plan
from fxpipe.planner.throttle import read_throttle
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.between_actions import between_actions
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.epochs import in_steps, tell_epoch
from fxpipe.runtime.process.local_evaluation import LocalEvaluation
from fxpipe.runtime.process.new_shapes import NewShapes
from fxpipe.runtime.process.own_checkpoint import open_checkpoint, write_own, write_whole
from fxpipe.runtime.process.own_loop import OwnLoop
from fxpipe.runtime.process.resume import Resumed, begin_or_go_on, opened, recipe_of, restore, resumed_options
from fxpipe.runtime.process.run_callbacks import RunCallbacks
from fxpipe.runtime.wires.mailbox import LocalTransport, Mailbox
from fxpipe.runtime.worker.assembly import open_worker
from fxpipe.runtime.worker.averages import averages_of
from fxpipe.runtime.worker.checkpoint import Checkpoint
from fxpipe.runtime.worker.evaluation_check import check_evaluation
from fxpipe.runtime.worker.evaluation_data import EvaluationData
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import copies
from fxpipe.schedule.action import Action
from fxpipe.stages.minibatch import ShapedMinibatches
from fxpipe.task.hooks import TrainingTask
from fxpipe.task.metrics import named_numbers


class LocalPipeline(OwnLoop):
    """Trains a build step by step in this process.

        pipeline = fxpipe.load("build/").local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
        losses = pipeline.run(data)
        model.load_state_dict(pipeline.state_dict())

    The process's own random state is left alone.

    Args:
        folder: a build directory.
        task: its `optimizer` is called once for each worker that trains.
        out: the folder for the files of the staleness log, if the options ask for one; None writes no file.
        report: called when worker 0 ends a minibatch (see `fxpipe.observe.record.OnStep`).
        keep_gradients: keep the last update's gradients for `gradients()` (synchronous schedules only).
        epoch: how many steps an epoch has; asked if a scheduler must know, and the options do not say.

    Attributes:
        fed: how many minibatches it has had, with those before the checkpoint that it goes on from.
        shapes: of batches: those of the build, and those that are made for it on demand.
        checkpoints: what saves it; None if it is not to be saved.
        callbacks: those of a run; None where the loop is the user's.
        waits: an evaluation may change learning rates: no worker goes on before it.
        temporary: the build's temporary folder, deleted with the pipeline; None if the build has a lasting one.

    Raises:
        BuildError, BackendError, ScheduleError, PolicyError: as `open_worker` and `recipe_of`.
    """

    def __init__(
        self,
        folder: str | Path,
        task: TrainingTask,
        options: PipelineOptions,
        *,
        out: str | None = None,
        report: OnStep | None = None,
        keep_gradients: bool = True,
        epoch: Callable[[], int] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.plan = read_plan(folder)
        self.options = options = in_steps(resumed_options(options, out))
        self.recipe: Recipe = recipe_of(self.plan, options)
        self.device = torch.device(self.plan.device)
        self.report = report
        self.temporary: tempfile.TemporaryDirectory[str] | None = None
        throttle = read_throttle(options.throttle, self.plan.ranks)
        self._mailbox = Mailbox(self.plan.all_edges, throttle, self.recipe.demand, self.plan.placement)
        self.transports = [LocalTransport(self._mailbox, w) for w in range(self.plan.workers)]
        checkpoint = None if options.weights is None else Checkpoint.open(options.weights, self.plan)
        self._task, self._out, self._epoch = task, out, epoch
        self._synchronous = self.recipe.schedule.synchronous
        self._keep_gradients = keep_gradients and self._synchronous
        self.shapes = NewShapes(self.folder, self.plan, task.step_hooks, options, self.device)
        self._set_up(checkpoint, opened(options, self.recipe, self.plan, checkpoint))

    def _set_up(self, checkpoint: Checkpoint | None, resumed: Resumed | None) -> None:
        """Open all workers, with the weights of a checkpoint if there is one."""
        plan, task, options = self.plan, self._task, self.options
        self.resumed = resumed
        self.fed = 0 if resumed is None else resumed.step
        self.executors: list[Executor] = [
            open_worker(
                plan,
                self.folder,
                w,
                self.recipe,
                transport,
                task,
                options,
                self.device,
                self._keep_gradients,
                self._out,
                self.fed or None,
                checkpoint,
            )
            for w, transport in enumerate(self.transports)
        ]
        if self._epoch is not None:
            tell_epoch(self.executors, self._epoch)
        self._minibatches = ShapedMinibatches(plan, self.folder, self.executors[0].buffers, task.loss_weight)
        self._shapes: dict[int, int] = {}
        for executor in self.executors:
            executor.shape_of = self._shapes.__getitem__
        self._shards = [] if resumed is None else restore(self.executors, resumed)
        self.shapes.attach(self.executors, self._minibatches)
        self.checkpoints = Checkpoints.of(options, plan, self.recipe, self._out, self.executors, resumed, self._shards)
        self._leaves: dict[tuple[int, int], Sequence[Any]] = {}
        self._losses: dict[int, Tensor] = {}
        self._newest: tuple[int, Tensor] = (-1, torch.empty(()))
        self._rows: list[Iterator[Action]] = []
        self._mailbox.clear()
        self._broken = False
        self._evaluation: LocalEvaluation | None = None
        self.callbacks: RunCallbacks | None = None
        self.waits = any(executor.store.updater.metric is not None for executor in self.executors)

    @property
    def data_mark(self) -> Any:
        """Where the data stood, if they said so, at the checkpoint that the pipeline goes on from."""
        return self._shards[0][0].data if self._shards else None

    @property
    def state_before(self) -> Any:
        """A worker's state (see `Shard`) at that checkpoint."""
        return self._shards[0][0].state if self._shards else None

    @property
    def edited(self) -> list[Path]:
        """Stage files that were changed since they were emitted."""
        return [stage.path for e in self.executors for stage in e.stages if stage.edited]

    def step(self, batch: Any) -> Tensor:
        """Feed one minibatch and run every action that can run; return its loss (a detached float32 scalar).

        With `async`, some backwards of this minibatch, and of those before it, may wait for later steps or `flush`.

        Raises:
            BatchError: the batch does not fit the build.
            RunError: a stage failed.
        """
        minibatch = self.fed
        self.feed(batch)
        found, loss = self._newest
        if found != minibatch:
            raise self._stuck()
        return loss.reshape(-1)[0]

    def feed(self, batch: Any) -> None:
        """As `step`, but the minibatch's loss may come in a later one: where workers wait for an evaluation.

        Raises:
            BatchError, RunError: as `step`.
        """
        self._whole()
        minibatch = self.fed
        shape, parts = self._minibatches(batch, minibatch)
        if not self._rows:
            self.begin()
        self._shapes[minibatch] = shape
        for microbatch, leaves in enumerate(parts):
            self._leaves[minibatch, microbatch] = leaves
        self.fed += 1
        self._pump()
        version = min(executor.store.version for executor in self.executors)
        for old in [known for known in self._shapes if known < version]:
            del self._shapes[old]

    @property
    def metrics(self) -> dict[str, float]:
        minibatch, found = self._newest
        return named_numbers(found, self.plan.metrics)[1] if minibatch >= 0 else {}

    def flush(self) -> None:
        self._whole()
        if not self._rows:
            return
        self._ending = True
        for executor in self.executors:
            executor.store.end(self.fed)
        self._pump()
        if self._in_flight:
            raise self._stuck()
        self._mailbox.clear()
        for executor in self.executors:
            executor.store.flushed()
            executor.store.updater.take_rates(self.fed)
        self._rows = []

    def evaluate(self, batches: Iterable[Any] | EvaluationData) -> dict[str, float]:
        """The mean of each of the user's metrics over `batches`, in eval mode, on the weights as they are.

        A batch counts as much as `loss_weight(batch)` says, or, without that hook, as it has samples. A scheduler that
        waits for a metric makes its step, if there were updates since the last.

        Raises:
            RunError: minibatches are in flight; or the build has no evaluation; or its code failed.
            BatchError: a batch has a shape that the build was not compiled for.
            TaskError: there is no batch, or those there are weigh nothing; or `loss_weight` failed.
        """
        self._whole()
        self._settled("evaluate")
        check_evaluation(self.plan, "evaluate()")
        if isinstance(batches, EvaluationData):
            return self.evaluation.run(batches, self.fed)
        given = batches
        data = EvaluationData(self.plan, lambda: given, self.options.seed, self._task.loss_weight)
        metrics = self.evaluation.run(data, self.fed)
        for executor in self.executors:
            executor.store.updater.evaluated(self.fed, metrics)
        return metrics

    @property
    def evaluation(self) -> LocalEvaluation:
        """The evaluators of all workers, loaded when they are first asked for."""
        if self._evaluation is None:
            self._evaluation = LocalEvaluation(
                self.plan, self.folder, self.options.seed, self.executors, self._mailbox.throttle
            )
            self._evaluation.evaluated = self.fed
        return self._evaluation

    def save(self, folder: str | Path) -> None:
        self.flush()
        self.resumed, self._shards = None, []  # here as where one goes on from it, nothing is in flight
        with replacing(Path(folder), "choose another folder") as fresh:
            written = [write_own(fresh, self.plan, executor) for executor in self.executors]
            write_whole(fresh, self.plan, self.recipe, self.options, self.fed, written)

    def load(self, folder: str | Path) -> None:
        self._whole()
        self._settled("load")
        self._set_up(*open_checkpoint(folder, self.plan, self.recipe, self.options))

    def close(self) -> None:
        self.flush()
        if self.checkpoints is not None:
            self.checkpoints.finish()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all parameters and persistent buffers, under every name the model has for them.

        Raises:
            RunError: minibatches are in flight, so that workers are at different versions.
        """
        self._settled("state_dict")
        return copies(self.plan, self.executors)

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """The same with the averages of the weights in place of those that are averaged (`ema`, or `averaged`).

        Raises:
            RunError: minibatches are in flight; or the pipeline keeps no averages.
            TaskError: the hook `averaged` failed.
        """
        self._settled("averaged_state_dict")
        averages = self.averages()
        if averages is None:
            raise RunError("the pipeline keeps no averages of the weights", hint="build.local(ema=0.999), or averaged=")
        return copies(self.plan, self.executors, averages)

    def averages(self) -> list[dict[str, Tensor]] | None:
        """For each worker, the averages of its trained weights by name; None if there are none."""
        return averages_of([executor.store.averages for executor in self.executors])

    def gradients(self) -> dict[str, Tensor]:
        """The mean gradient of the last step for every trained parameter, under its first name.

        Raises:
            RunError: the schedule is asynchronous: at no moment do all gradients of one step exist.
        """
        if not self._synchronous:
            raise RunError(
                f"schedule '{self.recipe.schedule.name}' has no moment at which all gradients of one step exist",
                hint="use schedule='1f1b' or 'gpipe' to look at gradients",
            )
        return {name: g for e in self.executors for name, g in e.store.gradients().items()}

    def staleness(self) -> list[dict[str, Any]]:
        """The means over the run by worker and parameter group (needs `log_staleness`; see `StalenessLog`)."""
        logs = [executor.store.staleness for executor in self.executors]
        return [{"worker": log.worker, **row} for log in logs if log is not None for row in log.summary()]

    def begin(self) -> None:
        """Begin with an empty pipeline, or go on with that of the checkpoint."""
        self._ending = False
        resumed, shards = self.resumed, self._shards
        self.resumed, self._shards = None, []
        schedule = self.recipe.schedule
        if resumed is None:
            self._rows = [self.recipe.segments.actions(schedule, w, self.fed) for w in range(self.plan.workers)]
        else:
            self._rows = [resumed.actions(self.recipe, w) for w in range(self.plan.workers)]
        self._next = [next(row) for row in self._rows]
        for worker, executor in enumerate(self.executors):
            executor.reset()
            begin_or_go_on(executor, resumed, shards[worker] if shards else [])

    def _pump(self) -> None:
        """Let the workers act in turn, one action each, until none can."""
        self._broken = True
        with self._random_apart(any(executor.draws for executor in self.executors)):
            acted = True
            while acted or self._mailbox.rest():
                acted = False
                for worker in range(self.plan.workers):
                    acted |= self._act(worker)
        self._broken = False

    def _act(self, worker: int) -> bool:
        if self.executors[worker].unsettled is not None:
            return self._settle(worker)
        if self.waits and self._evaluation is not None and self._evaluation.awaits(worker):
            return False
        while self._ending and self._next[worker].minibatch >= self.fed:
            if self.executors[worker].store.version == self.fed:
                return False
            self._next[worker] = next(self._rows[worker])
        action = self._next[worker]
        if not self._ready(worker, action):
            return False
        key = (action.minibatch, action.microbatch)
        leaves = self._leaves.pop(key) if worker == 0 and action.phase == "F" else None
        executor = self.executors[worker]
        if self._evaluation is not None:
            self._evaluation.before(worker, action)
        loss = executor.execute(action, leaves)
        if loss is not None:
            self._losses[action.minibatch] = loss
            self._newest = (action.minibatch, loss)
            if self.callbacks is not None:
                self.callbacks.tell(action.minibatch, loss)
        self._next[worker] = next(self._rows[worker])
        if worker == 0 and self.recipe.schedule.updates(action):
            reported = self._losses.pop(action.minibatch)
            if self.report:
                updater = executor.store.updater
                value, metrics = named_numbers(reported, self.plan.metrics)
                self.report(action.minibatch, value, updater.lr, updater.norm, metrics)
        self._acted(worker)
        return True

    def _settle(self, worker: int) -> bool:
        """Make the update that waits for other workers, if what it waits for has arrived."""
        executor = self.executors[worker]
        if not executor.can_settle:
            return False
        executor.settle()
        self._acted(worker)
        return True

    def _acted(self, worker: int) -> None:
        evaluate = None if self._evaluation is None else self._evaluation.after
        executors, callbacks = self.executors, self.callbacks
        between_actions([executors[worker]], executors, callbacks, self.checkpoints, evaluate, self.waits)

    def _ready(self, worker: int, action: Action) -> bool:
        if action.minibatch >= self.fed:
            return False
        executor, transport = self.executors[worker], self.transports[worker]
        edges, replicas = executor.waits_for(action)
        return (
            executor.heard(action)
            and all(transport.arrived(e, action.minibatch, action.microbatch) for e in edges)
            and all(transport.arrived_weights(*key) for key in replicas)
        )

    def _whole(self) -> None:
        if self._broken:
            raise RunError("an earlier step failed in the middle", hint="make a new pipeline")

    def _stuck(self) -> RunError:
        waiting = ", ".join(f"worker {w} at {action}" for w, action in enumerate(self._next))
        return RunError(
            f"the pipeline is stuck: {waiting}",
            hint="this is a defect of fxpipe, or of an edited stage that no longer sends what another stage waits for",
        )
