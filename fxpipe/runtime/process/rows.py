"""The rows that a process walks: of each rank that is here, or replica of one, its workers in rising order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.checkpoint.shard import Shard
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation, HeardEvaluation
from fxpipe.runtime.process.resume import Resumed, begin_or_go_on
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
    """A rank, or one of its replicas: what it does is walked one action after the other.

    Attributes:
        process: the one that has it, if each has one row.
        executors, transports: of its workers.
    """

    process: int
    rank: int
    replica: int
    executors: Sequence[Executor]
    transports: Sequence[WiredTransport]

    def events(self, recipe: Recipe, start: int, resumed: Resumed | None, stop: int | None = None) -> Iterator[Event]:
        """What it does from minibatch `start` on, or from where it goes on, to an end if there is one."""
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
        step: how many minibatches they have had.
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
    """Of each worker here the first replica that is, in rising order."""
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
    """What the workers here do in evaluations.

    Args:
        data: on worker 0.
    """
    row, executors = rows[0], first_replicas(rows)
    listening = plan.crossing and row.replica > 0
    kind = HeardEvaluation if listening else DistributedEvaluation
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
    """Begin with an empty pipeline after so many minibatches, or go on with that of a checkpoint.

    Args:
        shards: of each worker in the order of the rows, what was read of the checkpoint; empty without one.
        stop: where the rows end, if that is known.
    """
    for row in rows:
        for transport in row.transports:
            transport.begin(step)
    for place, executor in enumerate(executor for row in rows for executor in row.executors):
        begin_or_go_on(executor, resumed, shards[place] if shards else [], stop)


def meet(rows: Sequence[WalkedRow]) -> None:
    """The pipeline is empty: replicas that train apart get the same weights and buffers."""
    executors = [executor for row in rows for executor in row.executors]
    for executor in executors:
        executor.begin_meeting()
    for executor in executors:
        executor.end_meeting()


def shared_out(
    world: World, plan: Plan, rows: Sequence[WalkedRow], minibatch: int, parts: list[tuple[Any, ...]]
) -> dict[int, list[tuple[Any, ...]]]:
    """By replica of worker 0 that is here, its microbatches of a minibatch; all must have read the same."""
    replicas, first = plan.replicas_of(0), [row for row in rows if row.rank == 0]
    if replicas > 1 and not world.alone:
        first[0].executors[0].compare_batch(minibatch, number_of(parts))
    return {row.replica: parts[row.replica :: replicas] for row in first}
