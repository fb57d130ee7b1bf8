"""How a run stops after its last checkpoint: at a signal, or to go on under other cuts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxpipe.runtime.process.begin_again import MovingProcess
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.ends import PoliteStop, say_stopped
from fxpipe.runtime.process.world import Job
from fxpipe.runtime.wires.board import ASKED, MOVE
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer

STOPPING = 0.25
"""Seconds that worker 0 of a run that stops waits so that the others see it stop."""

GO_ON = "go on"
"""What follows the checkpoint for a move that cannot be made."""


class Stopping(Observer):
    """Ends this process when the last checkpoint is over; the thread that writes it does so, if there are others.

    Args:
        moving: makes this process begin again after a move, if no launcher starts it.

    Attributes:
        requests: of this process to stop.
        checkpoints: of the run; None if it makes none, and so does not stop.
    """

    def __init__(self, job: Job[Any], moving: MovingProcess | None) -> None:
        self._job, self._moving = job, moving
        self.requests = PoliteStop()
        self.checkpoints: Checkpoints | None = None

    def saves_at(self, step: int) -> bool:
        """Whether the run makes a checkpoint after so many steps."""
        return self.checkpoints is not None and self.checkpoints.due(step)

    def asked(self) -> bool:
        """Whether a signal has asked this process to stop."""
        return self.requests.asked is not None

    def then(self, saved: bool) -> str:
        """After the last checkpoint: the number of the build under which the run begins again; or that it goes on, if
        that was to be a move; empty if it stops."""
        move, _, number = (self._job.world.board.get(ASKED) or "").partition(" ")
        if move != MOVE or self.asked():
            return ""
        if saved and (self._moving is None or self._moving.may_move()):
            return number
        self._job.world.board.forget([ASKED])
        return GO_ON

    def stops(self, step: int, saved: Path | None, then: str) -> None:
        """The last checkpoint of a run that was asked to stop is over: with several processes, end this one at once."""
        if then == GO_ON:
            assert self.checkpoints is not None
            self.checkpoints.agenda.go_on(step)
            return
        self.requests.saved(step, saved)
        if self._job.world.alone:
            return
        if self._job.process == 0:
            if not then:
                say_stopped(step, saved)
            time.sleep(STOPPING)  # the others look for it
        try:
            if then and self._moving is not None:  # else a launcher starts it again
                self._moving.begin_again(then)
        finally:
            self.requests.exit()

    def between(self, executors: Sequence[Executor]) -> None:
        """If all workers are here, stop where they are between two actions; else the thread ends the process."""
        if self._job.world.alone:
            self.requests.give_up_if_saved()

    def lost_a_peer(self) -> None:
        """Another process is gone: if the run stops, it has ended first, and the thread that saves ends this one."""
        if self.checkpoints is not None and self.checkpoints.agenda.stop is not None:
            time.sleep(8 * STOPPING)  # until that thread knows it
        while self.requests.is_saved:
            time.sleep(STOPPING)
