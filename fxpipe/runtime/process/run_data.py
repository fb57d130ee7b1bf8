"""The minibatches of a run: what worker 0 reads, their shapes, and what hooks change of the state that they read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fxpipe.random_state import seed_everything
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.minibatch_notes import BatchesRead, ComingShapes, several_shapes
from fxpipe.runtime.process.new_shapes import NewShapes, of_run
from fxpipe.runtime.process.rows import WalkedRows
from fxpipe.runtime.process.training_loop import Limit
from fxpipe.runtime.process.world import Job
from fxpipe.runtime.worker.captures import Due
from fxpipe.runtime.worker.feed import Feed, agree_length
from fxpipe.runtime.worker.observer import Observer
from fxpipe.runtime.worker.state_of_hooks import StateOfHooks


class RunData:
    """Reads a run's data in worker 0's process, and gives all workers here what they must know of each minibatch.

    Made first, in the order of a local run: the data, then the user's other code.

    Attributes:
        feed: the user's batches, where worker 0 is.
        hooked: follows the state that hooks share with the step; None if the step reads none.
        options: of the run, in steps; as given, they may count epochs.
        shapes: those made during the run, once `attach` was called.
        batches: gives worker 0 its microbatches; None elsewhere.
        coming: the shapes of minibatches; None if there is only one.
    """

    shapes: NewShapes

    def __init__(self, job: Job[RunOptions]) -> None:
        plan, task, options, process = job.plan, job.task, job.options, job.process
        self.hooked = StateOfHooks(plan, job.folder, task) if plan.watched or plan.model_file.calls_model else None
        self.feed = Feed(task, options.seed) if plan.mesh.seat(process)[0] == 0 else None
        if self.feed is None:
            seed_everything(options.seed)
        self.total, options = agree_length(options, self.feed, task.callbacks.on_epoch is not None)
        self.options: RunOptions = of_run(options, plan)
        self.batches: BatchesRead | None = None
        self.coming: ComingShapes | None = None

    def around_optimizer(self, first: bool) -> AbstractContextManager[None]:
        """The context in which a worker makes its optimizer (see `WalkedRows`)."""
        return nullcontext() if self.hooked is None else self.hooked.of_optimizer(first)

    def around_callback(self, hook: str) -> AbstractContextManager[None]:
        """The context in which a callback is called."""
        return nullcontext() if self.hooked is None else self.hooked.of_callback(hook)

    def attach(self, job: Job[RunOptions], rows: WalkedRows, limit: Limit, due: Due) -> None:
        """Prepare the workers here. `due` says whether a checkpoint follows so many minibatches."""
        plan, task, options, world = job.plan, job.task, job.options, job.world
        self.shapes = NewShapes(job.folder, plan, task.step_hooks, options, world.device, world.board, world.pulse)
        minibatches, several = rows.minibatches(self.hooked), several_shapes(plan, options)
        if self.feed is not None and minibatches is not None:
            self.batches = BatchesRead(self.feed, minibatches, rows.every[0].watch, several, due, self.hooked)
        self.shapes.attach(rows.every, minibatches)
        if several:
            read = None if self.batches is None else self.batches.read
            self.coming = ComingShapes(world.line, rows.every, limit, read, self.shapes.prepare)
            for executor in rows.every:
                executor.shape_of = self.coming
        if self.hooked is not None:
            self.hooked.attach(rows.every, several, options.checkpoint_every is not None)

    @property
    def observers(self) -> list[Observer]:
        """What follows the rows here, in this order: positions in the data, shapes, state of hooks."""
        return [each for each in (self.feed, self.coming, self.hooked) if each is not None]

    def go_on(self, step: int, mark: Mapping[str, Any] | None, resumed: bool) -> None:
        """The pipeline has begun after so many minibatches. `mark` is where the data were, from the checkpoint."""
        if self.feed is not None:
            self.feed.go_on(step, mark)
        if self.hooked is not None and resumed:
            self.hooked.go_on()
