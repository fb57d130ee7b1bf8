"""How a run stops after its last checkpoint: at a signal, or to go on under other cuts.

Where no launcher starts a process again, as under torchrun, it becomes the same command once more, so none ends:

    process 0:   train; a thread looks at the workers, compiles, asks │ save │ begin again, from the checkpoint
    the others:  train                                                │ save │ begin again

What a process must know of the moves so far is in an environment variable. It imports torch, meets the others and
agrees with them as any process that begins.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from fxpipe.checkpoint.shelf import Shelf
from fxpipe.errors import FxpipeError
from fxpipe.messages import warn
from fxpipe.observe.progress import leave_bar
from fxpipe.observe.pulse import STEP, Pulse
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.ends import StopRequests, forget_memory, say_stopped
from fxpipe.runtime.process.guardian import Guardian
from fxpipe.runtime.process.moves import GONE_BACK, Moved, Moves
from fxpipe.runtime.process.new_build import REBALANCED
from fxpipe.runtime.process.world import Job, World
from fxpipe.runtime.wires.board import ASKED, MOVE
from fxpipe.runtime.wires.meeting import BEGUN, MOVED
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer

STOPPING = 0.25
"""Seconds that worker 0 of a run that stops waits so that the others see it stop."""

GO_ON = "go on"
"""What follows the checkpoint for a move that cannot be made."""

BETWEEN_LOOKS = 0.5
"""Seconds between two looks at the workers, whose signs are in the process group's store."""


class MovingProcess:
    """One process of a run with `--rebalance` that torchrun has started by a command; `leave` is called before it
    begins again."""

    def __init__(self, options: RunOptions, leave: Callable[[], None] = lambda: None) -> None:
        self._leave, self._folder = leave, os.getcwd()  # user code may change this
        self._held = ExitStack()  # what looks at the workers
        moved = json.loads(os.environ.get(MOVED, "{}"))
        self._moved = Moved(**moved) if moved.pop("process", 0) == os.getpid() else Moved()  # else it is another run's
        self.moves = Moves(options)
        self.options = self.moves.options
        self._proven = 0  # the step after which the newest move has worked

    def go_on(self) -> RunOptions:
        """The options of the run after its moves; FxpipeError if the build of the last one cannot be read."""
        if self._moved.build is not None:
            self.moves.begun_again(self._moved)
            self.options = self.moves.options
            self._proven = max(Shelf.of(str(self.options.out)).steps(), default=0) + self.moves.plan.ranks
        return self.options

    def looking(self, process: int, world: World) -> AbstractContextManager[object]:
        """Inside, process 0 looks at the workers."""
        over, moves = threading.Event(), self.moves

        def look() -> None:
            with suppress(RuntimeError):  # the store ends with the process that holds it
                while not over.wait(BETWEEN_LOOKS):
                    if signs := world.signs():
                        moves.look(signs)

        if process == 0 and self.options.rebalance:
            self._held.callback(moves.end)
            self._held.callback(over.set)
            guardian = self._held.enter_context(Guardian())
            moves.begin(world.board, guardian)
            threading.Thread(target=look, name="fxpipe moves", daemon=True).start()
        return self._held

    def may_move(self) -> bool:
        """In process 0, when the run is saved: whether it can go on under the new build."""
        try:
            self.moves.move()
        except (FxpipeError, OSError) as error:
            warn(str(error))
            return False
        return True

    def begin_again(self, number: str) -> None:
        """Go on under the new build, which has this number."""
        build, before = str(Path(str(self.options.out)) / REBALANCED / number), self.options.build
        self._as(Moved(build, before, self.moves.rows, self.moves.since))

    def go_back(self, error: Exception, pulse: Pulse) -> None:
        """An error ends this process: if it was made to begin again some steps before, go on under the build before."""
        if self._moved.before is None or pulse.numbers[STEP] > self._proven:
            return
        warn(f"{error}\n  {GONE_BACK}")
        if os.environ["RANK"] == "0":
            self.moves.forget(self.options.build)
        self._as(Moved(self._moved.before, None, self._moved.rows[:-1], over=True))

    def _as(self, moved: Moved) -> NoReturn:
        """Become the command that this process was started with."""
        self._held.close()
        leave_bar()
        sys.stdout.flush()
        sys.stderr.flush()
        self._leave()
        forget_memory(os.getpid())
        with suppress(OSError):  # it was deleted
            os.chdir(self._folder)
        for opened in os.listdir("/dev/fd"):
            if int(opened) > 2:
                with suppress(OSError):  # this listing's own
                    os.set_inheritable(int(opened), False)  # connections end
        text = json.dumps({"process": os.getpid(), **asdict(moved)})
        environment = {BEGUN: str(int(os.environ.get(BEGUN, 0)) + 1), MOVED: text}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})


class Stopping(Observer):
    """Ends this process when the last checkpoint is over; the thread that writes it does so, if there are others.

    The first signal asks for a last checkpoint, the second ends the process. A run that makes no `checkpoints` does not
    stop. `moving` makes this process begin again after a move, if no launcher starts it.
    """

    def __init__(self, job: Job[Any], moving: MovingProcess | None) -> None:
        self._job, self._moving = job, moving
        self.requests = StopRequests(self._exit)
        self.checkpoints: Checkpoints | None = None
        self._last: tuple[int, Path | None] | None = None  # the last checkpoint, when it is over

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
        self._last = (step, saved)
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
            self._exit()

    def between(self, executors: Sequence[Executor]) -> None:
        """If all workers are here, stop where they are between two actions; else the thread ends the process."""
        if self._job.world.alone and self._last is not None and self.asked():
            say_stopped(*self._last)
            self.requests.give_up_if_asked()

    def lost_a_peer(self) -> None:
        """Another process is gone: if the run stops, it has ended first, and the thread that saves ends this one."""
        if self.checkpoints is not None and self.checkpoints.agenda.stop is not None:
            time.sleep(8 * STOPPING)  # until that thread knows it
        while self._last is not None:
            time.sleep(STOPPING)

    def _exit(self) -> None:
        """End the process as the signal would have."""
        os._exit(128 + (self.requests.asked or signal.SIGTERM))
