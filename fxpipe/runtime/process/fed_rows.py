"""The rows of the workers here, walked as far as minibatches were fed: what a user's own loop moves on call by call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fxpipe.checkpoint.shard import Shard
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.minibatch_notes import Losses, StepLoss
from fxpipe.runtime.process.resume import Resumed, restore
from fxpipe.runtime.process.rows import WalkedRow, begin_rows, first_replicas, meet, shared_out
from fxpipe.runtime.process.training_loop import train
from fxpipe.runtime.process.world import World
from fxpipe.schedule.action import Event


class FedRows:
    """The workers here, in rows.

    Args:
        out: the folder for checkpoints, if the options ask for some.
        resumed, shards: the checkpoint that they were opened with, and what was read of it already; None: as built.

    Attributes:
        executors: of the workers here, in rising order; of replicas the first here.
        every: those of all replicas here.
        fed: how many minibatches they have had, with those before the checkpoint.
        begun: something was fed since the last flush.
        resumed: the checkpoint that they went on from; None if they did not.
        checkpoints: what saves them; None if they are not to be saved.
        losses: of all that was fed.

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
            self._shards = restore(every, resumed, shards)
        self._shapes: dict[int, int] = {}
        for executor in self.every:
            executor.shape_of = self._shapes.__getitem__
        self.checkpoints: Checkpoints | None = None
        if options.checkpoint_every is not None:
            self.checkpoints = Checkpoints(options, plan, recipe, out, every, resumed, self._shards, world.exchange)
        self._parts: dict[tuple[int, int], list[Any]] = {}  # by minibatch and replica of worker 0
        self.begun = self._ending = False
        self.losses = Losses(plan, world.line, self.executors)

    def step(self, shape: int, parts: list[tuple[Any, ...]]) -> StepLoss:
        """Feed a minibatch, and walk on as far as the rows can go with it; return its loss.

        Args:
            shape: of its batch.
            parts: where worker 0 is, its microbatches, of all replicas.
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
        """Finish the backwards and updates of all that was fed."""
        if not self.begun:
            return
        self._ending = True
        for executor in self.every:
            executor.store.versions.end(self.fed, told=False)
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
        """They begin empty from now on, without what the checkpoint had in flight."""
        self._going_on, self._shards = None, []

    def _begin(self) -> None:
        """Begin with an empty pipeline, or go on with that of the checkpoint."""
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
        for executor, transport in zip(row.executors, row.transports, strict=True):
            executor.store.versions.expect_all()
            transport.drop_weights()
        for transport in row.transports:
            transport.finish()

    def _go(self) -> None:
        device = self.world.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=any(executor.draws for executor in self.every)):
            self.world.turns.go()


class _Fed:
    """What one of the rows does, as far as it was fed.

    Args:
        resumed: what it goes on from; None begins with an empty pipeline.
    """

    def __init__(self, rows: FedRows, row: WalkedRow, resumed: Resumed | None) -> None:
        self._rows, self._workers = rows, len(row.executors)
        self._events = row.events(rows.recipe, rows.fed, resumed)
        self._upcoming = next(self._events)
        self._ended = rows.fed * self._workers  # last backwards that have come out of the row
        self._ends = row.executors[0].schedule.ends

    def next(self) -> Event | None:
        """The next event of what was fed; None if there is none yet."""
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
        """Wait until something comes, or the rows are flushed; whether something comes."""
        rows, fed = self._rows, self._rows.fed
        if not rows._ending:
            rows.world.turns.wait(lambda: rows._ending or rows.fed > fed, lambda: "the next batch", idle=True)
            return True
        return False
