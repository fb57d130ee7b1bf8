"""The rows that a process walks: one for each rank here, or for each of its replicas, with its workers in rising order.

A run walks them to its end, a user's own loop as far as it has fed minibatches (`Limit`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxpipe.checkpoint.shard import Shard
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation, ReceivedEvaluation, sharing
from fxpipe.runtime.process.losses import Losses
from fxpipe.runtime.process.resume import Resumed, begin_or_go_on, restore
from fxpipe.runtime.process.training_loop import EndedStep, Limit, LimitedRow, train
from fxpipe.runtime.process.world import Job
from fxpipe.runtime.wires.wired import WiredTransport
from fxpipe.runtime.worker.assembly import open_worker
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.runtime.worker.state_of_hooks import StateOfHooks
from fxpipe.stages.minibatch import ShapedMinibatches

Microbatches = list[tuple[Any, ...]]
"""Those of a minibatch, with the leaves of each, in the plan's order."""


@dataclass(frozen=True)
class WalkedRow:
    """A rank, or one of its replicas, whose actions are walked one after the other.

    Attributes:
        executors: of its workers.
    """

    rank: int
    replica: int
    executors: list[Executor]


class WalkedRows:
    """The rows of this process: opened, restored, begun, walked as far as their limit, and emptied.

    Args:
        checkpoint: the weights to start from; None takes the build's, or the model's own.
        everywhere: all processes read the losses, not only worker 0's.
        keep_gradients: as of `WorkerSetting`.
        around: the context in which a worker makes its optimizer; it gets whether that is the first worker here.

    Attributes:
        resumed: the checkpoint that the workers go on from; None if they begin anew.
        step: how many minibatches they had when they were opened.
        shards: what each worker has read of the checkpoint, until the rows begin; empty without one.
        rows: in the order of their processes.
        every: the executors of all replicas here, in the order of the rows.
        executors: the first replica here of each worker, in rising order.
        losses: of all steps.

    Raises:
        FxpipeError: as `open_worker`.
    """

    def __init__(
        self,
        job: Job[Any],
        checkpoint: Checkpoint | None,
        resumed: Resumed | None,
        everywhere: bool,
        keep_gradients: bool = False,
        around: Callable[[bool], AbstractContextManager[None]] = lambda first: nullcontext(),
    ) -> None:
        self._job, self.resumed = job, resumed
        self.step = 0 if resumed is None else resumed.step
        self.shards: list[list[Shard]] = []
        self.rows: list[WalkedRow] = []
        plan, world = job.plan, job.world
        for process in world.here:
            rank, replica = plan.mesh.seat(process)
            row = WalkedRow(rank, replica, [])
            for worker in plan.hosted(rank):
                schedule, wires = job.recipe.of_worker(worker).schedule, world.wires(process)
                transport = WiredTransport.of_training(plan, worker, wires, job.addresses, schedule, replica)
                with around(not self.rows and not row.executors):
                    of_replicas = world.collective(worker, replica)
                    setting = WorkerSetting(
                        plan, worker, job.recipe, job.task, job.options, world.device, of_replicas, keep_gradients
                    )
                    row.executors.append(open_worker(setting, job.folder, transport, self.step or None, checkpoint))
            self.rows.append(row)
        self.every = [executor for row in self.rows for executor in row.executors]
        first = {executor.worker: executor for executor in reversed(self.every)}
        self.executors = [first[worker] for worker in sorted(first)]
        self.losses = Losses(plan, world.line, self.executors, world.turns, everywhere)
        self._shares: dict[int, dict[int, Microbatches]] = {}  # of minibatches, for the replicas that lack theirs

    def restore(self, read: list[list[Shard]] | None = None) -> None:
        """Restore what workers have in the checkpoint that they go on from, if there is one.

        Args:
            read: their shards, if they have been read.
        """
        if self.resumed is not None:
            self.shards = restore(self._job.plan, self.every, self.resumed, read)

    def minibatches(self, hooked: StateOfHooks | None = None) -> ShapedMinibatches | None:
        """What cuts minibatches, where worker 0 is; replicas in other processes must read the same."""
        if self.rows[0].rank:
            return None
        job, first = self._job, self.every[0]
        tensors = first.buffers if hooked is None else hooked.newest_over(first.buffers)
        minibatches = ShapedMinibatches(job.plan, Path(job.folder), tensors, job.task.loss_weight)
        if job.plan.replicas_of(0) > 1 and not job.world.alone:
            minibatches.compare = first.compare_batch
        return minibatches

    def evaluation(self, data: EvaluationData) -> DistributedEvaluation:
        """Prepare evaluations of batches, which worker 0 reads."""
        job, row = self._job, self.rows[0]
        plan, world = job.plan, job.world
        listening = plan.crossing and row.replica > 0
        kind = ReceivedEvaluation if listening else DistributedEvaluation
        replicas = 1 if world.alone else sharing(plan)
        collective = None if row.rank or replicas == 1 else world.collective(0, row.replica)
        source = None if row.rank or listening else data
        return kind(self.executors, job.folder, source, world.line, world.alone, replicas, collective)

    def begin(
        self,
        step: int,
        limit: Limit,
        observers: Sequence[Observer],
        batches: Callable[[int], Microbatches] | None,
        report: Callable[[EndedStep], None] | None = None,
    ) -> None:
        """Begin with an empty pipeline, or once go on in the middle of the checkpoint's; `go` walks the rows.

        Args:
            step: how many minibatches the workers have had.
            limit: of all rows.
            observers: of each row.
            batches: where worker 0 is, gives a minibatch; called once for each.
            report: as of `train`, in worker 0's process.
        """
        resumed, shards, turns = self.resumed if self.shards else None, self.shards, self._job.world.turns
        self.shards = []
        for executor in self.every:
            executor.reset()
            executor.transport.begin(step)
        for place, executor in enumerate(self.every):
            begin_or_go_on(executor, resumed, shards[place] if shards else [], limit.end)
        walks = []
        for row in self.rows:
            schedule, start = row.executors[0].schedule, step if resumed is None else resumed.start
            events = LimitedRow(schedule, row.rank, limit, turns, step, start)
            feed = None if row.rank or batches is None else partial(self._share, batches, row.replica)
            reports = report if row.rank == row.replica == 0 else None
            walks.append(partial(train, row.executors, events, self.losses, feed, reports, observers))
        turns.begin(walks)

    def forget_checkpoint(self) -> None:
        """Begin with an empty pipeline from now on, not with what the checkpoint had in flight."""
        self.shards = []

    def go(self) -> None:
        """Walk the rows as far as their limit lets them; the generators of this process stay as they are."""
        world = self._job.world
        world.turns.draws = any(executor.draws for executor in self.every)
        devices = [world.device] if world.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=world.turns.draws):
            world.turns.go()

    def meet(self) -> None:
        """The pipeline is empty: replicas that train separately get the same weights and buffers."""
        for executor in self.every:
            executor.begin_meeting()
        for executor in self.every:
            executor.end_meeting()

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        for executor in self.every:
            executor.transport.finish()

    def _share(self, batches: Callable[[int], Microbatches], replica: int, minibatch: int) -> Microbatches:
        """The microbatches of a minibatch that a replica of worker 0 computes."""
        if minibatch not in self._shares:
            replicas, parts = [row.replica for row in self.rows if row.rank == 0], batches(minibatch)
            every = self._job.plan.replicas_of(0)
            self._shares[minibatch] = {each: parts[each::every] for each in replicas}
        shares = self._shares[minibatch]
        share = shares.pop(replica)
        if not shares:
            del self._shares[minibatch]
        return share
