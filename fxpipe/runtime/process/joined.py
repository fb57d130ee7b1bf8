"""A user's own loop over processes: each has one worker of the pipeline, and makes the same calls."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fxpipe.checkpoint.shard import Shard
from fxpipe.errors import BatchError, FxpipeError, RunError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.alike import ALIKE, REFUSED, Calls
from fxpipe.runtime.process.allocator import reuse_freed_memory
from fxpipe.runtime.process.check_run import check_evaluation, check_unchanged
from fxpipe.runtime.process.device import common_backend, own_device
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation
from fxpipe.runtime.process.epochs import in_steps
from fxpipe.runtime.process.membership import Member, membership
from fxpipe.runtime.process.minibatch_notes import Losses, StepLoss
from fxpipe.runtime.process.new_shapes import NewShapes
from fxpipe.runtime.process.own_checkpoint import open_checkpoint, write_together
from fxpipe.runtime.process.own_loop import OwnLoop
from fxpipe.runtime.process.resume import Resumed, begin_or_go_on, opened, recipe_of
from fxpipe.runtime.process.together import agree_on, gathered, of_worker_0
from fxpipe.runtime.process.warnings import warn_if_edited
from fxpipe.runtime.wires.addresses import Addresses, ProcessLine
from fxpipe.runtime.wires.distributed import DistTransport
from fxpipe.runtime.wires.exchange import StoreExchange
from fxpipe.runtime.wires.group import peers
from fxpipe.runtime.wires.throttled import open_wires
from fxpipe.runtime.worker.assembly import open_worker
from fxpipe.runtime.worker.checkpoint import Checkpoint
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.executor import Executor
from fxpipe.schedule.action import LOOKAHEAD, Action
from fxpipe.stages.minibatch import ShapedMinibatches
from fxpipe.task.model_file import Task


class JoinedPipeline(OwnLoop):
    """One worker of a pipeline whose every process runs the user's loop.

    It trains the same bits as `LocalPipeline`. All processes make the same calls in the same order; where one does not,
    all end with an error. Outside a call a worker computes nothing; others go on as far as they can without it.

    Args:
        options: of the run, without those that `check_own_loop` refuses.
        task: makes the optimizer of this worker's parameters.

    Attributes:
        rank: which worker this process is.
        fed: how many minibatches the pipeline has had, with those before the checkpoint that it goes on from.

    Raises:
        FxpipeError: as `membership` and `LocalPipeline`.
    """

    def __init__(self, options: RunOptions, task: Task) -> None:
        self._held = ExitStack()
        self._closed = self._broken = False
        reuse_freed_memory()
        with self._held:
            member = self._held.enter_context(membership(options, task))
            self._open(member)
            self._held = self._held.pop_all()

    def _open(self, member: Member) -> None:
        agreed, self.rank, self._pulse = member.agreed, member.rank, member.pulse
        self.plan, self._task = agreed.plan, agreed.task
        if not self.plan.mesh.plain:
            replicas = f" with {self.plan.processes} processes" if self.plan.mesh.replicated else ""
            raise RunError(
                f"the build has {self.plan.workers} workers on {self.plan.ranks} rank"
                f"{'s' if self.plan.ranks > 1 else ''}{replicas}, and a loop of your own in each process "
                "has one worker, without replicas",
                where=agreed.options.build,
                hint="`fxpipe run` trains it; so does fxpipe.load(BUILD).local(), with all workers in one process",
            )
        self.options = in_steps(agreed.options)
        self._inside = False
        beat = self._pulse.after_beat
        self._pulse.after_beat = lambda: self._beat(beat)
        self.recipe = recipe_of(self.plan, self.options)
        self.device = own_device(self.plan.device)
        self._addresses = Addresses(self.plan, self.recipe.demand)
        backend = common_backend(self.device, self.rank, self.plan.workers)
        throttle, channels = self.options.throttle, self._addresses.channels
        self._wires = open_wires(self.plan, throttle, self.rank, backend, channels, self.device)
        wires, addresses = self._wires, self._addresses
        self._transport = DistTransport.of_training(self.plan, self.rank, wires, addresses, self.recipe.schedule)
        self._given: Iterable[Any] = ()
        with peers(self.rank):
            exchange = StoreExchange()
        hooks = self._task.step_hooks
        self._new = NewShapes(self.options.build, self.plan, hooks, self.options, self.device, exchange, self._pulse)
        self._set_up(agreed.checkpoint, opened(self.options, self.recipe, self.plan, agreed.checkpoint))
        warn_if_edited(*self.executor.stages)
        check_unchanged(agreed.files)
        self._calls = Calls(self.rank, self.plan.workers, self._transport)
        self._losses = Losses(self.plan, ProcessLine.of(self.plan, self.rank), {self.rank: self._transport})
        with peers(self.rank):
            dist.barrier()
        self._pulse.phase = "training"

    def _set_up(
        self, checkpoint: Checkpoint | None, resumed: Resumed | None, shards: list[Shard] | None = None
    ) -> None:
        """Open the worker, with what is in a checkpoint if there is one; its shards, if they have been read."""
        self.fed = 0 if resumed is None else resumed.step
        self.executor = open_worker(
            self.plan,
            self.options.build,
            self.rank,
            self.recipe,
            self._transport,
            self._task,
            self.options,
            self.device,
            continue_after=self.fed or None,
            checkpoint=checkpoint,
        )
        self.executors: list[Executor] = [self.executor]
        self.executor.store.updater.scheduler_due(1)  # now, not at the first update
        self._resumed, self._shards = resumed, []
        if resumed is not None:
            self._shards = resumed.shards(self.rank) if shards is None else shards
            self.executor.load(self._shards, resumed.exact)
        self._evaluation: DistributedEvaluation | None = None
        self._newest: StepLoss | None = None
        self._minibatches: ShapedMinibatches | None = None
        if self.rank == 0:
            self._minibatches = ShapedMinibatches(
                self.plan, Path(self.options.build), self.executor.buffers, self._task.loss_weight
            )
        self._shapes: dict[int, int] = {}
        self.executor.shape_of = self._shapes.__getitem__
        self._new.attach(self.executors, self._minibatches)
        self._leaves: dict[tuple[int, int], Sequence[Any]] = {}
        self._row: Iterator[Action] | None = None
        self._window: deque[Action] = deque()
        self._watched()

    def step(self, batch: Any = None) -> StepLoss:
        """Feed one minibatch, worker 0's, and run this worker's actions up to its next forward; return its loss.

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
            shape = self._tell("step", shape)
            self._shapes[minibatch] = shape
            with self._working():
                self._new.hear(shape)
                if self._row is None:
                    self._begin()
                for microbatch, leaves in enumerate(parts):
                    self._leaves[minibatch, microbatch] = leaves
                self.fed += 1
                loss = self._newest = self._losses.step(minibatch)
                self._advance()
            for old in [known for known in self._shapes if known < self.executor.store.version]:
                del self._shapes[old]
            return loss

    def _reset(self) -> None:
        with self._call("reset"):
            super()._reset()

    def flush(self) -> None:
        with self._call("flush"):
            self._flush()

    def evaluate(self, batches: Iterable[Any] | None = None) -> dict[str, float]:
        """The mean of each of the user's metrics over `batches`, as `LocalPipeline.evaluate`; on all workers.

        Args:
            batches: on worker 0; the others do not look at them.
        """
        self._settled("evaluate")
        check_evaluation(self.plan, "evaluate()")
        with self._call("evaluate"), self._working():
            if self._evaluation is None:
                self._evaluation = self._make_evaluation()
                self._watched()
            self._given = () if batches is None else batches
            self._pulse.phase = "evaluating"
            found = self._evaluation.run([self.executor.state(self.fed)])
            self._pulse.phase = "training"
            self._given = ()
            metrics = of_worker_0(found or {}, self.rank)
            self.executor.store.updater.evaluated(self.fed, metrics)
            return metrics

    @property
    def metrics(self) -> dict[str, float]:
        return {} if self._newest is None else self._newest.metrics

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the parameters that this worker owns, under every name the model has for them.

        The whole model is never gathered on one worker: `save` writes it.

        Raises:
            RunError: minibatches are in flight.
        """
        self._settled("state_dict")
        owned = self.executor.store.parameters
        return {
            name: owned[p.name].detach().clone()
            for p in self.plan.parameters
            if p.owner == self.rank
            for name in p.names
        }

    def save(self, folder: str | Path) -> None:
        """As `OwnLoop.save`; all workers return when it is whole, and all see the folder."""
        with self._call("save"):
            self._flush()
            self._resumed, self._shards = None, []  # here as where one goes on from it, nothing is in flight
            with self._working():
                error = write_together(Path(folder), self.plan, self.recipe, self.options, self.executor)
            if error is not None:
                raise error

    def load(self, folder: str | Path) -> None:
        self._settled("load")
        with self._call("load"):
            self._flush()
            error: FxpipeError | None = None
            try:
                checkpoint, resumed = open_checkpoint(folder, self.plan, self.recipe, self.options)
                shards = resumed.shards(self.rank)
            except FxpipeError as met:
                error = met
            agree_on(error, self.rank, self.plan.workers)
            with self._working():
                self._set_up(checkpoint, resumed, shards)

    def close(self) -> None:
        if self._closed:
            return
        try:
            with self._call("close"):
                self._flush()
                self._transport.finish()
                with peers(self.rank):
                    dist.barrier()  # who leaves breaks the connections of those who are still on their way here
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

    def _begin(self) -> None:
        resumed, shards = self._resumed, self._shards
        self._resumed, self._shards = None, []
        self._row = (
            self.recipe.schedule.actions(self.rank, self.fed)
            if resumed is None
            else resumed.actions(self.recipe, self.rank)
        )
        self._upcoming = next(self._row)
        self._pulled = self.fed  # minibatches whose last backward has come out of the row
        self.executor.reset()
        self._transport.begin(self.fed)
        begin_or_go_on(self.executor, resumed, shards)

    def _advance(self, ending: bool = False) -> None:
        """Run this worker's actions up to the first of a minibatch that was not fed; when ending, all but those."""
        with self._random_apart(self.executor.draws):
            while True:
                while len(self._window) <= LOOKAHEAD and (action := self._pull(ending)) is not None:
                    self.executor.expect(action)
                    self._window.append(action)
                self.executor.settle()
                if not self._window and not (ending and self.executor.store.owed is not None):
                    return
                if self._window:
                    action = self._window.popleft()
                    first = action.phase == "F" and self.rank == 0
                    leaves = self._leaves.pop((action.minibatch, action.microbatch)) if first else None
                    loss = self.executor.execute(action, leaves)
                else:
                    loss = self.executor.catch_up()
                if loss is not None:
                    self._losses.tell(*loss)

    def _pull(self, ending: bool) -> Action | None:
        assert self._row is not None
        while ending and self._pulled < self.fed <= self._upcoming.minibatch:
            self._upcoming = next(self._row)
        if self._upcoming.minibatch >= self.fed:
            return None
        action, self._upcoming = self._upcoming, next(self._row)
        if self.recipe.schedule.ends(action):
            self._pulled += 1
        return action

    def _flush(self) -> None:
        if self._row is None:
            return
        with self._working():
            self._advance(ending=True)
            self._losses.settle()
            self.executor.store.expect_all()
            self._transport.drop_weights()
            self._transport.finish()
            self.executor.store.flushed()
            self.executor.store.updater.take_rates(self.fed)
            self._row = None

    def _make_evaluation(self) -> DistributedEvaluation:
        folder, seed, data = self.options.build, self.options.seed, None
        if self.rank == 0:
            data = EvaluationData(self.plan, lambda: self._given, seed, self._task.loss_weight)
        return DistributedEvaluation(self.plan, self.executors, folder, seed, self._wires, self._addresses, data)

    def _watched(self) -> None:
        self._pulse.follow([self.executor.watch], [] if self._evaluation is None else self._evaluation.watches)

    @contextmanager
    def _call(self, name: str | None = None) -> Iterator[None]:
        """Inside, the worker is expected to move on; `name` is told to the next one."""
        if self._closed:
            raise RunError("the pipeline was closed", hint="fxpipe.join(...) makes another")
        if self._broken:
            raise RunError("an earlier call failed in the middle", hint="end all processes, and start them again")
        self._inside = True
        self._pulse.move()
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
            self._pulse.move()
        after()

    @property
    def _in_flight(self) -> bool:
        """The same on all workers, also on those that have made all their updates."""
        return self._row is not None and not self.recipe.schedule.synchronous

    def _agree_on_rates(self, rates: list[float], error: RunError | None) -> None:
        with self._call("set_lr"):
            agree_on(error, self.rank, self.plan.workers)
            given = gathered(rates, self.rank, self.plan.workers)
            if any(others != rates for others in given):
                self._broken = True
                raise RunError(f"the workers set different learning rates: {given}", hint=ALIKE)
