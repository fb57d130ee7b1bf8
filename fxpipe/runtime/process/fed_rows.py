"""The rows of a user's own loop, which are walked as far as the loop has fed minibatches."""

from __future__ import annotations

from fxpipe.checkpoint.shard import Shard
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.minibatch_notes import Losses, StepLoss
from fxpipe.runtime.process.resume import Resumed
from fxpipe.runtime.process.rows import Microbatches, WalkedRows
from fxpipe.runtime.process.training_loop import Limit
from fxpipe.runtime.process.world import Job
from fxpipe.runtime.worker.observer import Observer


class FedRows:
    """Walks the rows of this process as far as minibatches are fed, whose end is known at a flush.

    Args:
        shards: what was read of the checkpoint that they go on from, if it was.

    Attributes:
        begun: something was fed since the last flush.
        checkpoints: what saves them; None if nothing does.
        losses: of all minibatches fed.
        newest: the loss of the newest step; None before the first.

    Raises:
        FxpipeError: as `WalkedRows` and `Checkpoints`.
    """

    def __init__(
        self,
        job: Job[PipelineOptions],
        checkpoint: Checkpoint | None,
        resumed: Resumed | None,
        shards: list[list[Shard]] | None,
    ) -> None:
        self.rows = rows = WalkedRows(job, checkpoint, resumed, job.world.alone and job.recipe.schedule.synchronous)
        for executor in rows.every:
            executor.store.updater.scheduler_due(1)  # now, not at the first update
        rows.restore(shards)
        self._limit, self.begun = Limit(rows.step), False
        self._shapes: dict[int, int] = {}  # of minibatches in flight
        self._parts: dict[int, Microbatches] = {}  # of minibatches that no row has begun
        for executor in rows.every:
            executor.shape_of = self._shapes.__getitem__
        self.losses = Losses(job.plan, job.world.line, rows.executors)
        self.newest: StepLoss | None = None
        self._observers: list[Observer] = [self.losses]
        self.checkpoints: Checkpoints | None = None
        if job.options.checkpoint_every is not None:
            self.checkpoints = Checkpoints(job, rows)
            self._observers.append(self.checkpoints)

    @property
    def fed(self) -> int:
        """How many minibatches they have had, including those before the checkpoint."""
        return self._limit.fed

    def step(self, shape: int, parts: Microbatches) -> StepLoss:
        """Feed a minibatch, walk the rows as far as possible with it, and return its loss.

        Args:
            shape: of its batch.
            parts: in worker 0's process, the microbatches of all replicas.
        """
        minibatch, rows = self.fed, self.rows
        self._shapes[minibatch], self._parts[minibatch] = shape, parts
        if not self.begun:
            self.begun, self._limit = True, Limit(minibatch)
            rows.begin(minibatch, self._limit, self._observers, self._parts.pop)
        self._limit.fed += 1
        self.newest = self.losses.step(minibatch)
        rows.go()
        oldest = min(executor.store.version for executor in rows.every)
        for over in [one for one in self._shapes if one < oldest]:
            del self._shapes[over]
        return self.newest

    def flush(self) -> None:
        """Finish the backwards and updates of all minibatches fed."""
        if not self.begun:
            return
        self._limit.end = self.fed
        every = self.rows.every
        for executor in every:
            executor.store.versions.end(self.fed, known_to_all=False)
        self.rows.go()
        self.losses.settle()
        for executor in every:
            executor.take_buffers(self.fed)
        self.rows.meet()
        for executor in every:
            executor.store.versions.flushed()
            executor.store.updater.take_rates(self.fed)
        self.begun = False
