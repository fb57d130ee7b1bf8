"""Records the steps of a run in worker 0's process, and reads their losses as late as it may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from fxpipe.observe.record import Record
from fxpipe.runtime.process.training_loop import EndedStep
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.not_finite import LossCheck
from fxpipe.runtime.worker.observer import Observer


class StepsRecorded(Observer):
    """Records steps as they end; a loss on its way is read a step later, unless something follows from its step.

    Args:
        follows: each says whether something that may read the record follows from a version.

    Attributes:
        check: looks at each loss; None if losses need not be finite.
    """

    def __init__(self, record: Record, follows: Sequence[Callable[[int], bool]]) -> None:
        self.record, self._follows = record, follows
        self.check: LossCheck | None = None
        self._ended: deque[EndedStep] = deque()  # those that are not recorded yet

    def report(self, step: EndedStep) -> None:
        """Worker 0 has ended a minibatch."""
        self._ended.append(step)
        self.read(1)

    def between(self, executors: Sequence[Executor]) -> None:
        """A loss that is not finite comes before what follows from its step."""
        version = executors[0].store.version
        if any(follows(version) for follows in self._follows):
            self.read()

    def read(self, later: int = 0) -> None:
        """Record the steps that have ended, all but so many that must be waited for."""
        while self._ended and (len(self._ended) > later or not self._ended[0].loss.computing):
            step = self._ended.popleft().read()
            self.record.step(step)
            if self.check is not None:
                self.check.look(step.minibatch, step.loss)

    def ends(self, total: int) -> None:
        """The run ends after this many steps, perhaps fewer than it was to have."""
        self.record.total = total

    def saves(self, step: int) -> None:
        """A checkpoint is about to be complete: sync what was logged so far, too."""
        self.record.sync()

    def forget(self) -> None:
        """Steps that have ended and are not recorded will not be."""
        self._ended.clear()

    def close(self) -> None:
        """The run is over, or has failed: record what is known, and end all files."""
        with suppress(RuntimeError):  # an error that the device may have, too
            while self._ended and not self._ended[0].loss.computing:
                self.record.step(self._ended.popleft().read())
        self.record.close()
