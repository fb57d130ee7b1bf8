"""A user's own loop: its calls, which all processes make alike, and its rows, which go as far as it has fed them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from fxpipe.checkpoint.shard import Shard
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.errors import BatchError, FxpipeError, RunError
from fxpipe.observe.pulse import Pulse
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.losses import StepLoss
from fxpipe.runtime.process.minibatch_notes import Calls
from fxpipe.runtime.process.resume import Resumed
from fxpipe.runtime.process.rows import Microbatches, WalkedRows
from fxpipe.runtime.process.training_loop import Limit
from fxpipe.runtime.process.world import Job
from fxpipe.runtime.wires.addresses import ProcessLine
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer


class FedRows:
    """Walks the rows of this process as far as minibatches are fed, whose end is known at a flush.

    Attributes:
        begun: something was fed since the last flush.
        newest: the loss of the newest step; None before the first.
    """

    def __init__(
        self,
        job: Job[PipelineOptions],
        checkpoint: Checkpoint | None,
        resumed: Resumed | None,
        shards: list[list[Shard]] | None,
    ) -> None:
        keeps = job.world.alone and job.recipe.schedule.synchronous
        self.rows = rows = WalkedRows(job, checkpoint, resumed, True, keeps)
        for executor in rows.every:
            executor.store.updater.scheduler.due(1)  # now, not at the first update
        rows.restore(shards)
        self._limit, self.begun = Limit(rows.step), False
        self._shapes: dict[int, int] = {}  # of minibatches in flight
        self._parts: dict[int, Microbatches] = {}  # of minibatches that no row has begun
        for executor in rows.every:
            executor.shape_of = self._shapes.__getitem__
        self.newest: StepLoss | None = None
        self._observers: list[Observer] = []
        self.checkpoints: Checkpoints | None = None
        if job.options.checkpoint_every is not None:
            self.checkpoints = Checkpoints(job, rows)
            self._observers.append(self.checkpoints)

    @property
    def fed(self) -> int:
        """How many minibatches they have had, including those before the checkpoint."""
        return self._limit.fed

    def step(self, shape: int, parts: Microbatches) -> StepLoss:
        """Feed a minibatch of this shape, walk the rows as far as possible with it, and return its loss.

        In worker 0's process, the parts are the microbatches of all replicas.
        """
        minibatch, rows = self.fed, self.rows
        self._shapes[minibatch], self._parts[minibatch] = shape, parts
        if not self.begun:
            self.begun, self._limit = True, Limit(minibatch)
            rows.begin(minibatch, self._limit, self._observers, self._parts.pop)
        self._limit.fed += 1
        rows.losses.begins(minibatch)
        self.newest = rows.losses[minibatch]
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
        self.rows.losses.settle()
        for executor in every:
            executor.take_buffers(self.fed)
        self.rows.meet()
        for executor in every:
            executor.store.versions.flushed()
            executor.store.updater.take_rates(self.fed)
        self.begun = False


class LoopCalls:
    """Makes the calls of a pipeline, until it is closed or an error leaves messages in flight.

    While the user's own code runs, the pulse says that this process moves on.
    """

    def __init__(self, pulse: Pulse) -> None:
        self.state: Literal["open", "broken", "closed"] = "open"
        self._pulse, self._inside = pulse, threading.Event()
        pulse.after_beat.insert(0, partial(_beat, pulse, self._inside))

    def compare(self, line: ProcessLine, executors: Sequence[Executor]) -> None:
        """From now on compare calls with those of other processes, by the wires of the workers here."""
        self._calls = Calls(line, executors)

    @contextmanager
    def call(self, name: str | None = None) -> Iterator[None]:
        """Inside, the workers here are expected to move on; `name` is sent to the next process.

        Raises:
            RunError: the pipeline was closed, or an earlier call failed in the middle.
        """
        if self.state == "closed":
            raise RunError("the pipeline was closed", hint="make a new one")
        if self.state == "broken":
            raise RunError("an earlier step failed in the middle", hint="make a new pipeline")
        self._inside.set()
        self._pulse.move()
        try:
            if name is not None:
                self.announce(name)
            yield
        finally:
            self._inside.clear()

    def announce(self, name: str, shape: int | None = None) -> int:
        """See `Calls.make`; after an error in it the workers here and elsewhere are at different points."""
        try:
            return self._calls.make(name, shape)
        except BatchError:
            raise
        except FxpipeError:
            self.state = "broken"
            raise

    @contextmanager
    def working(self) -> Iterator[None]:
        """An error inside leaves messages in flight: the pipeline cannot go on."""
        self.state = "broken"
        yield
        self.state = "open"


def _beat(pulse: Pulse, inside: threading.Event) -> None:
    if not inside.is_set():  # the user's own code may take any time
        pulse.move()
