"""All workers of a pipeline in one process: for debugging, studies of many workers, and a single device.

Gives the same bits as the distributed run: the same actions, versions, seeds and memory layouts.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.checkpoint.shard import replicas_that_write
from fxpipe.errors import RunError
from fxpipe.files import replacing
from fxpipe.observe.record import OnStep
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.between_actions import between_actions
from fxpipe.runtime.process.check_run import check_evaluation
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.epochs import in_steps, tell_epoch
from fxpipe.runtime.process.local_evaluation import LocalEvaluation
from fxpipe.runtime.process.new_shapes import NewShapes
from fxpipe.runtime.process.own_checkpoint import open_checkpoint, write_own, write_whole
from fxpipe.runtime.process.own_loop import OwnLoop
from fxpipe.runtime.process.resume import Resumed, begin_or_go_on, opened, recipe_of, restore, resumed_options
from fxpipe.runtime.process.run_callbacks import RunCallbacks
from fxpipe.runtime.wires.addresses import ReplicaSeat
from fxpipe.runtime.wires.collective import LocalCollective, ReplicaBoard
from fxpipe.runtime.wires.mailbox import LocalTransport, Mailbox
from fxpipe.runtime.worker.assembly import open_worker
from fxpipe.runtime.worker.averages import averages_of
from fxpipe.runtime.worker.checkpoint import Checkpoint
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.executor import Executor, MinibatchLoss
from fxpipe.runtime.worker.final_weights import copies
from fxpipe.schedule.action import Action
from fxpipe.stages.minibatch import ShapedMinibatches
from fxpipe.task.metrics import named_numbers
from fxpipe.task.model_file import Task


class _Seat:
    """A replica of a worker, and where it is in its row."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.row: Iterator[Action] = iter(())
        self.next = Action("F", 0)


class LocalPipeline(OwnLoop):
    """Trains a build step by step in this process.

        pipeline = fxpipe.load("build/").local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
        losses = pipeline.run(data)
        model.load_state_dict(pipeline.state_dict())

    The process's own random state is left alone.

    Args:
        folder: a build directory.
        task: its `optimizer` is called once for each worker that trains.
        out: the folder for checkpoints, if the options ask for some.
        report: called when worker 0 ends a minibatch (see `fxpipe.observe.record.OnStep`).
        keep_gradients: keep the last update's gradients for `gradients()` (synchronous schedules only).
        epoch: how many steps an epoch has; asked if a scheduler must know, and the options do not say.

    Attributes:
        executors: of replica 0, by worker.
        every: those of all replicas.
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
        task: Task,
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
        plan = self.plan
        if options.throttle is not None:
            raise RunError(
                "workers in one process have no links: --throttle has nothing to slow down",
                hint="leave out --local, or --throttle",
            )
        self._mailboxes = [Mailbox(plan.all_edges) for _ in range(plan.dp)]
        self._several = plan.mesh.replicated
        self._boards = [ReplicaBoard(plan.replicas_of(worker)) for worker in range(plan.workers)]
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
        self._seats = [
            _Seat(
                open_worker(
                    plan,
                    self.folder,
                    worker,
                    self.recipe,
                    self._transport(worker, replica),
                    task,
                    options,
                    self.device,
                    self._keep_gradients,
                    self.fed or None,
                    checkpoint,
                    LocalCollective(self._boards[worker], replica) if plan.replicas_of(worker) > 1 else None,
                )
            )
            for replica in range(max(plan.mesh.replicas))
            for worker in range(plan.workers)
            if replica < plan.replicas_of(worker)
        ]
        self.every = [seat.executor for seat in self._seats]
        self.executors: list[Executor] = self.every[: plan.workers]
        for executor in self.every if self._several else ():
            executor.store.holds_back = True
        if self._epoch is not None:
            tell_epoch(self.every, self._epoch)
        self._minibatches = ShapedMinibatches(plan, self.folder, self.executors[0].buffers, task.loss_weight)
        self._shapes: dict[int, int] = {}
        for executor in self.every:
            executor.shape_of = self._shapes.__getitem__
        self._shards = [] if resumed is None else restore(self.every, resumed)
        self.shapes.attach(self.every, self._minibatches)
        own = self._shards[: len(self._writers)]
        self.checkpoints: Checkpoints | None = None
        if options.checkpoint_every is not None:
            self.checkpoints = Checkpoints(options, plan, self.recipe, self._out, self._writers, resumed, own)
        self._leaves: dict[tuple[int, int], Sequence[Any]] = {}  # by minibatch and, of that, microbatch
        self._losses: dict[int, Tensor] = {}
        self._unreported: deque[tuple[int, float | None, float | None]] = deque()
        self._newest = MinibatchLoss(-1, torch.empty(()))
        self._begun = False
        self._clear()
        self._broken = False
        self._evaluation: LocalEvaluation | None = None
        self.callbacks: RunCallbacks | None = None
        self.waits = any(executor.store.updater.metric is not None for executor in self.executors)

    def _transport(self, worker: int, replica: int) -> LocalTransport:
        """Each pipeline of replicas has a mailbox of its own; where pipelines cross, there is one for all."""
        if self.plan.crossing:
            return LocalTransport(self._mailboxes[0], worker, ReplicaSeat(worker, replica, self.plan.replicas))
        return LocalTransport(self._mailboxes[replica], worker)

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
        if not self._begun:
            self.begin()
        self._shapes[minibatch] = shape
        for microbatch, leaves in enumerate(parts):
            self._leaves[minibatch, microbatch] = leaves
        self.fed += 1
        self._pump()
        for executor in self.every:
            while (loss := executor.hear()) is not None:
                self._heard_loss(executor, loss)
        version = min(executor.store.version for executor in self.every)
        for old in [known for known in self._shapes if known < version]:
            del self._shapes[old]

    @property
    def metrics(self) -> dict[str, float]:
        minibatch, found = self._newest
        return named_numbers(found, self.plan.metrics)[1] if minibatch >= 0 else {}

    def flush(self) -> None:
        self._whole()
        if not self._begun:
            return
        self._ending = True
        for executor in self.every:
            executor.store.end(self.fed)
        self._pump()
        if self._in_flight:
            raise self._stuck()
        for executor in self.every:
            executor.take_buffers(self.fed)
        for executor in self.every:
            executor.begin_meeting()
        for executor in self.every:
            executor.end_meeting()
        self._clear()
        for executor in self.every:
            executor.store.flushed()
            executor.store.updater.take_rates(self.fed)
        self._begun = False

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
        for executor in self.every:
            executor.store.updater.evaluated(self.fed, metrics)
        return metrics

    @property
    def evaluation(self) -> LocalEvaluation:
        """The evaluators of all workers, loaded when they are first asked for."""
        if self._evaluation is None:
            self._evaluation = LocalEvaluation(self.plan, self.folder, self.options.seed, self.executors, self.every)
            self._evaluation.evaluated = self.fed
        return self._evaluation

    def save(self, folder: str | Path) -> None:
        self.flush()
        self.resumed, self._shards = None, []  # here as where one goes on from it, nothing is in flight
        with replacing(Path(folder), "choose another folder") as fresh:
            written = [write_own(fresh, self.plan, executor) for executor in self._writers]
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
        return {name: g for e in self.every for name, g in e.store.gradients().items()}

    def staleness(self) -> list[dict[str, Any]]:
        """The means over the run by worker and parameter group (needs `log_staleness`; see `StalenessLog`)."""
        logs = [executor.store.staleness for executor in self.executors]
        return [{"worker": log.worker, **row} for log in logs if log is not None for row in log.summary()]

    def begin(self) -> None:
        """Begin with an empty pipeline, or go on with that of the checkpoint."""
        self._ending, self._begun = False, True
        resumed, shards = self.resumed, self._shards
        self.resumed, self._shards = None, []
        for place, seat in enumerate(self._seats):
            worker = seat.executor.worker
            recipe = self.recipe.of_worker(worker)
            if resumed is None:
                seat.row = recipe.schedule.actions(worker, self.fed)
            else:
                seat.row = resumed.actions(recipe, worker)
            seat.next = next(seat.row)
            seat.executor.reset()
            begin_or_go_on(seat.executor, resumed, shards[place] if shards else [])

    @property
    def _writers(self) -> Sequence[Executor]:
        """Those that write a checkpoint's files: the first of `every`, or all."""
        return [e for e in self.every if e.replica < replicas_that_write(self.plan, e.worker)]

    @property
    def _here(self) -> Sequence[Executor]:
        return self.every

    def _clear(self) -> None:
        """Forget all that is under way between workers."""
        for mailbox in self._mailboxes:
            mailbox.letters.clear()
        for board in self._boards:
            board.clear()

    def _pump(self) -> None:
        """Let the workers act in turn, one action each, until none can."""
        self._broken = True
        with self._random_apart(any(executor.draws for executor in self.executors)):
            acted = True
            while acted:
                acted = False
                for seat in self._seats:
                    acted |= self._act(seat)
        self._broken = False

    def _act(self, seat: _Seat) -> bool:
        executor = seat.executor
        worker = executor.worker
        if executor.unsettled is not None:
            return self._settle(seat)
        if self.waits and self._evaluation is not None and self._evaluation.awaits(executor):
            return False
        while self._ending and seat.next.minibatch >= self.fed:
            if executor.store.summed == self.fed:
                return self._catch_up(executor)
            seat.next = next(seat.row)
        action = seat.next
        updated = executor.store.updated_by(action)
        if not self._ready(executor, action, updated):
            return False
        leaves = None
        if worker == 0 and action.phase == "F":
            leaves = self._leaves.pop((action.minibatch, self.plan.microbatch(action.microbatch, 0, executor.replica)))
        self._before(executor, updated)
        self._heard_loss(executor, executor.execute(action, leaves))
        seat.next = next(seat.row)
        if executor.unsettled is None or not self._several:
            self._report(executor, updated)
            self._acted(executor)
        return True

    def _catch_up(self, executor: Executor) -> bool:
        """The worker's row is over: make the update that the flush makes, if one is owed and what it waits for is
        there."""
        owed = executor.store.owed
        if owed is None or not (self._several or executor.heard(owed)):
            return False
        self._before(executor, owed)
        self._heard_loss(executor, executor.catch_up())
        if executor.unsettled is None:
            self._report(executor, owed)
            self._acted(executor)
        return True

    def _before(self, executor: Executor, updated: int | None) -> None:
        if self._evaluation is not None and executor.replica == 0 and updated is not None:
            self._evaluation.before(executor.worker)

    def _settle(self, seat: _Seat) -> bool:
        """Make the update that waits for other workers, if what it waits for has arrived."""
        executor = seat.executor
        if executor.store.can_announce:
            executor.announce()
            return True
        if not executor.can_settle:
            return False
        minibatch = executor.unsettled
        self._heard_loss(executor, executor.settle())
        if executor.unsettled is not None:  # it goes on once the other replicas are as far
            return True
        if self._several:
            self._report(executor, minibatch)
        self._acted(executor)
        return True

    def _heard_loss(self, executor: Executor, loss: MinibatchLoss | None) -> None:
        """The loss worker says a minibatch's loss; its replicas say the same, or, where they train apart, their own."""
        if self.plan.outer is not None and executor.replica:
            return
        if loss is not None and loss.minibatch > self._newest[0]:
            self._losses[loss.minibatch] = loss.value
            self._newest = loss
            if self.callbacks is not None:
                self.callbacks.tell(*loss)
            self._tell()

    def _report(self, executor: Executor, minibatch: int | None) -> None:
        """Report a minibatch that worker 0 has ended with its update."""
        if executor.worker == executor.replica == 0 and minibatch is not None:
            self._unreported.append((minibatch, executor.store.updater.lr, executor.store.updater.norm))
            self._tell()

    def _tell(self) -> None:
        """Report the minibatches that worker 0 has ended and whose losses are known."""
        while self._unreported and self._unreported[0][0] in self._losses:
            minibatch, rate, norm = self._unreported.popleft()
            reported = self._losses.pop(minibatch)
            if self.report:
                value, metrics = named_numbers(reported, self.plan.metrics)
                self.report(minibatch, value, rate, norm, metrics)

    def _acted(self, executor: Executor) -> None:
        evaluate = None if self._evaluation is None else self._evaluation.after
        between_actions([executor], self.every, self.callbacks, self.checkpoints, evaluate, self.waits)

    def _ready(self, executor: Executor, action: Action, updated: int | None) -> bool:
        if action.minibatch >= self.fed:
            return False
        transport = executor.transport
        assert isinstance(transport, LocalTransport)
        edges, weight_copies = executor.waits_for(action)
        return (
            (self._several or executor.heard(updated))
            and executor.can_begin(action)
            and all(transport.arrived(e, action.minibatch, action.microbatch) for e in edges)
            and all(transport.arrived_weights(*key) for key in weight_copies)
        )

    def _whole(self) -> None:
        if self._broken:
            raise RunError("an earlier step failed in the middle", hint="make a new pipeline")

    def _stuck(self) -> RunError:
        waiting = ", ".join(f"{_name(seat.executor, self.plan)} at {seat.next}" for seat in self._seats)
        return RunError(
            f"the pipeline is stuck: {waiting}",
            hint="this is a defect of fxpipe, or of an edited stage that no longer sends what another stage waits for",
        )


def _name(executor: Executor, plan: Plan) -> str:
    which = f", replica {executor.replica}" if plan.replicas_of(executor.worker) > 1 else ""
    return f"worker {executor.worker}{which}"
