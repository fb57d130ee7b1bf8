"""The rows that a process walks: one for each rank here, or for each of its replicas, with its workers in rising order.

A run walks them to its end; a user's own loop only as far as it has fed minibatches (`FedRows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fxpipe.checkpoint.shard import Shard
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation, ReceivedEvaluation
from fxpipe.runtime.process.minibatch_notes import Losses, StepLoss
from fxpipe.runtime.process.resume import Resumed, begin_or_go_on, restore
from fxpipe.runtime.process.training_loop import train
from fxpipe.runtime.process.world import World
from fxpipe.runtime.wires.addresses import Addresses
from fxpipe.runtime.wires.wired import WiredTransport
from fxpipe.runtime.worker.assembly import open_worker
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.executor import Executor
from fxpipe.schedule.action import Event
from fxpipe.stages.minibatch import number_of
from fxpipe.task.model_file import Task


@dataclass(frozen=True)
class WalkedRow:
    """A rank, or one of its replicas, whose actions are walked one after the other.

    Attributes:
        process: its process, if each process has one row.
        executors, transports: of its workers.
    """

    process: int
    rank: int
    replica: int
    executors: Sequence[Executor]
    transports: Sequence[WiredTransport]

    def events(self, recipe: Recipe, start: int, resumed: Resumed | None, stop: int | None = None) -> Iterator[Event]:
        """Its events from minibatch `start`, or from where it goes on, until minibatch `stop`, if given."""
        recipe = recipe.of_worker(self.executors[0].worker)
        if resumed is not None:
            return resumed.row(recipe, self.rank, stop)
        schedule = recipe.schedule
        return schedule.row(self.rank, start) if stop is None else schedule.row_until(self.rank, stop, start)


def open_rows(
    world: World,
    plan: Plan,
    folder: str,
    recipe: Recipe,
    addresses: Addresses,
    task: Task,
    options: PipelineOptions,
    step: int,
    checkpoint: Checkpoint | None,
    keep_gradients: bool = False,
) -> list[WalkedRow]:
    """Open all workers that are here.

    Args:
        folder: of the build.
        step: how many minibatches the workers have had.
        checkpoint, keep_gradients: as of `open_worker`.

    Raises:
        FxpipeError: as `open_worker`.
    """
    rows = []
    for process in world.here:
        rank, replica = plan.seat(process)
        wires, executors, transports = world.wires(process), list[Executor](), list[WiredTransport]()
        for worker in plan.hosted(rank):
            schedule = recipe.of_worker(worker).schedule
            transports.append(WiredTransport.of_training(plan, worker, wires, addresses, schedule, replica))
            executor = open_worker(
                plan,
                folder,
                worker,
                recipe,
                transports[-1],
                task,
                options,
                world.device,
                keep_gradients,
                step or None,
                checkpoint,
                world.collective(worker, replica),
            )
            executors.append(executor)
        rows.append(WalkedRow(process, rank, replica, executors, transports))
    return rows


def first_replicas(rows: Sequence[WalkedRow]) -> list[Executor]:
    """The first replica here of each worker, in rising order."""
    found: dict[int, Executor] = {}
    for executor in (executor for row in rows for executor in row.executors):
        found.setdefault(executor.worker, executor)
    return [found[worker] for worker in sorted(found)]


def open_evaluation(
    world: World,
    plan: Plan,
    folder: str,
    addresses: Addresses,
    rows: Sequence[WalkedRow],
    seed: int,
    data: EvaluationData | None,
) -> DistributedEvaluation:
    """Prepare evaluations with the workers here.

    Args:
        data: on worker 0.
    """
    row, executors = rows[0], first_replicas(rows)
    listening = plan.crossing and row.replica > 0
    kind = ReceivedEvaluation if listening else DistributedEvaluation
    wires = [world.wires(plan.process_of(e.worker, e.replica)) for e in executors]
    return kind(
        plan,
        executors,
        folder,
        seed,
        wires,
        addresses,
        None if row.rank or listening else data,
        world.line,
        None if row.rank else world.collective(0, row.replica),
        world.alone,
    )


def begin_rows(
    rows: Sequence[WalkedRow],
    step: int,
    resumed: Resumed | None,
    shards: Sequence[list[Shard]],
    stop: int | None = None,
) -> None:
    """Begin with an empty pipeline after `start` minibatches, or go on with a checkpoint's.

    Args:
        shards: what each worker, in the order of the rows, read of the checkpoint; empty without one.
        stop: where the rows end, if that is known.
    """
    for row in rows:
        for transport in row.transports:
            transport.begin(step)
    for place, executor in enumerate(executor for row in rows for executor in row.executors):
        begin_or_go_on(executor, resumed, shards[place] if shards else [], stop)


def meet(rows: Sequence[WalkedRow]) -> None:
    """The pipeline is empty: replicas that train separately get the same weights and buffers."""
    executors = [executor for row in rows for executor in row.executors]
    for executor in executors:
        executor.begin_meeting()
    for executor in executors:
        executor.end_meeting()


def shared_out(
    world: World, plan: Plan, rows: Sequence[WalkedRow], minibatch: int, parts: list[tuple[Any, ...]]
) -> dict[int, list[tuple[Any, ...]]]:
    """The microbatches of a minibatch for each replica of worker 0 here; all must have read the same."""
    replicas, first = plan.replicas_of(0), [row for row in rows if row.rank == 0]
    if replicas > 1 and not world.alone:
        first[0].executors[0].compare_batch(minibatch, number_of(parts))
    return {row.replica: parts[row.replica :: replicas] for row in first}


class FedRows:
    """The workers here in rows that are walked as far as minibatches are fed.

    Args:
        out: the folder for checkpoints, if the options ask for some.
        resumed, shards: the checkpoint that they were opened with, and what was read of it; None: as built.

    Attributes:
        executors: of the workers here, in rising order; only the first replica here of each.
        every: the executors of all replicas here.
        fed: how many minibatches they have had, including those before the checkpoint.
        begun: something was fed since the last flush.
        resumed: the checkpoint that they went on from; None if they did not.
        checkpoints: what saves them; None if nothing does.
        losses: of all minibatches fed.

    Raises:
        FxpipeError: as `restore` and `Checkpoints`.
    """

    def __init__(
        self,
        rows: Sequence[WalkedRow],
        world: World,
        plan: Plan,
        recipe: Recipe,
        options: PipelineOptions,
        out: str | None,
        resumed: Resumed | None,
        shards: list[list[Shard]] | None,
    ) -> None:
        self.rows, self.world, self.plan, self.recipe = rows, world, plan, recipe
        self.fed = 0 if resumed is None else resumed.step
        self.every = every = [executor for row in self.rows for executor in row.executors]
        self.executors = first_replicas(self.rows)
        for executor in every:
            executor.store.updater.scheduler_due(1)  # now, not at the first update
        self.resumed = self._going_on = resumed
        self._shards: list[list[Shard]] = []
        if resumed is not None:
            self._shards = restore(plan, every, resumed, shards)
        self._shapes: dict[int, int] = {}
        for executor in self.every:
            executor.shape_of = self._shapes.__getitem__
        self.checkpoints: Checkpoints | None = None
        if options.checkpoint_every is not None:
            self.checkpoints = Checkpoints(options, plan, recipe, out, every, resumed, self._shards, world.exchange)
        self._parts: dict[tuple[int, int], list[Any]] = {}  # of each minibatch and replica of worker 0
        self.begun = self._ending = False
        self.losses = Losses(plan, world.line, self.executors)

    def step(self, shape: int, parts: list[tuple[Any, ...]]) -> StepLoss:
        """Feed a minibatch, walk the rows as far as possible with it, and return its loss.

        Args:
            shape: of its batch.
            parts: in worker 0's process, the microbatches of all replicas.
        """
        minibatch, self._shapes[self.fed] = self.fed, shape
        if not self.begun:
            self._begin()
        if self.rows[0].rank == 0:
            shares = shared_out(self.world, self.plan, self.rows, minibatch, parts)
            self._parts |= {(minibatch, replica): own for replica, own in shares.items()}
        self.fed += 1
        loss = self.losses.step(minibatch)
        self._go()
        oldest = min(executor.store.version for executor in self.every)
        for old in [known for known in self._shapes if known < oldest]:
            del self._shapes[old]
        return loss

    def flush(self) -> None:
        """Finish the backwards and updates of all minibatches fed."""
        if not self.begun:
            return
        self._ending = True
        for executor in self.every:
            executor.store.versions.end(self.fed, known_to_all=False)
        self._go()
        self.losses.settle()
        for executor in self.every:
            executor.take_buffers(self.fed)
        meet(self.rows)
        for executor in self.every:
            executor.store.versions.flushed()
            executor.store.updater.take_rates(self.fed)
        self.begun = False

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        for row in self.rows:
            for transport in row.transports:
                transport.finish()

    def forget_checkpoint(self) -> None:
        """Begin with an empty pipeline from now on, not with what the checkpoint had in flight."""
        self._going_on, self._shards = None, []

    def _begin(self) -> None:
        """Begin with an empty pipeline, or go on with the checkpoint's."""
        resumed, shards = self._going_on, self._shards
        self.forget_checkpoint()
        self.begun, self._ending = True, False
        for executor in self.every:
            executor.reset()
        begin_rows(self.rows, self.fed, resumed, shards)
        self.world.turns.draws = any(executor.draws for executor in self.every)
        walked = [(row, _Fed(self, row, resumed)) for row in self.rows]
        self.world.turns.begin([partial(self._walk, row, fed) for row, fed in walked])

    def _walk(self, row: WalkedRow, fed: _Fed) -> None:
        """Walk a row until a flush."""
        tells = row.replica == 0 or self.plan.outer is None or not self.world.alone
        train(
            self.plan,
            row.executors,
            row.transports,
            fed.next,
            (lambda minibatch: self._parts.pop((minibatch, row.replica))) if row.rank == 0 else None,
            observers=[each for each in (self.losses if tells else None, self.checkpoints) if each is not None],
            more=fed.more,
        )

    def _go(self) -> None:
        device = self.world.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=any(executor.draws for executor in self.every)):
            self.world.turns.go()


class _Fed:
    """The events of one row, as far as it was fed.

    Args:
        resumed: the checkpoint that it goes on from; None begins with an empty pipeline.
    """

    def __init__(self, rows: FedRows, row: WalkedRow, resumed: Resumed | None) -> None:
        self._rows, self._workers = rows, len(row.executors)
        self._events = row.events(rows.recipe, rows.fed, resumed)
        self._upcoming = next(self._events)
        self._ended = rows.fed * self._workers  # last backwards that the row has given
        self._ends = row.executors[0].schedule.ends

    def next(self) -> Event | None:
        """The next event; None until more is fed."""
        rows = self._rows
        if rows._ending:
            while self._ended < rows.fed * self._workers and self._upcoming[1].minibatch >= rows.fed:
                self._upcoming = next(self._events)
        if self._upcoming[1].minibatch >= rows.fed:
            return None
        event, self._upcoming = self._upcoming, next(self._events)
        self._ended += self._ends(event[1])
        return event

    def more(self) -> bool:
        """Wait until a minibatch is fed or the rows are flushed; return whether there are more events."""
        rows, fed = self._rows, self._rows.fed
        if not rows._ending:
            rows.world.turns.wait(lambda: rows._ending or rows.fed > fed, lambda: "the next batch", idle=True)
            return True
        return False
