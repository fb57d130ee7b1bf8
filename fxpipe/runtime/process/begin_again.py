"""Moves units under torchrun: each process becomes the same command once more, so for torchrun none ends.

    process 0:   train; a thread looks at the workers, compiles, asks │ save │ begin again, from the checkpoint
    the others:  train                                                │ save │ begin again

What a process must know of the moves so far is in an environment variable. It imports torch, meets the others and
agrees with them as any process that begins.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from fxpipe.checkpoint.shelf import Shelf
from fxpipe.errors import FxpipeError
from fxpipe.messages import warn
from fxpipe.observe.progress import leave_bar
from fxpipe.observe.pulse import STEP, Pulse
from fxpipe.observe.run_json import MoveJson
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.ends import forget_memory
from fxpipe.runtime.process.guardian import Guardian
from fxpipe.runtime.process.moves import GONE_BACK, Moves
from fxpipe.runtime.process.new_build import REBALANCED
from fxpipe.runtime.process.resume import NEWEST
from fxpipe.runtime.process.world import World
from fxpipe.runtime.wires.meeting import BEGUN, MOVED

GLANCE = 0.5
"""Seconds between two looks at the workers, whose signs are in the process group's store."""


@dataclass(frozen=True)
class Moved:
    """What a process knows of the moves of its run.

    Attributes:
        build: under which it goes on; None: the one that the command names.
        before: the build under which it can go on if it cannot begin; None if no move has just been made.
        rows, since: of `Moves`; in process 0.
        over: no other moves are made.
    """

    build: str | None = None
    before: str | None = None
    rows: list[MoveJson] = field(default_factory=list)
    since: float = 0.0
    over: bool = False


class MovingProcess:
    """One process of a run with `--rebalance` that torchrun has started by a command.

    Args:
        leave: is called before it begins again.

    Raises:
        RunError: the options ask for what cannot be done.
    """

    def __init__(self, options: RunOptions, leave: Callable[[], None] = lambda: None) -> None:
        self._leave, self._folder = leave, os.getcwd()  # user code may change this
        self._held = ExitStack()  # what looks at the workers
        told = json.loads(os.environ.get(MOVED, "{}"))
        self._moved = Moved(**told) if told.pop("process", 0) == os.getpid() else Moved()  # else it is another run's
        self.moves = Moves(options)
        self.options = self.moves.options
        self._proven = 0  # the step after which the newest move has worked

    def go_on(self) -> RunOptions:
        """The options of the run as it is after its moves.

        Raises:
            FxpipeError: the build of the last move cannot be read.
        """
        if self._moved.build is not None:
            options = replace(self.options, build=self._moved.build, resume=NEWEST, weights=None)
            self.options = options = replace(options, rebalance=not self._moved.over)
            self.moves.go_on(options, self._moved.before, self._moved.rows, self._moved.since)
            self._proven = max(Shelf.of(str(options.out)).steps(), default=0) + self.moves.plan.ranks
        return self.options

    def looking(self, process: int, world: World) -> AbstractContextManager[object]:
        """Inside, process 0 looks at the workers."""
        over, moves = threading.Event(), self.moves

        def look() -> None:
            with suppress(RuntimeError):  # the store ends with the process that holds it
                while not over.wait(GLANCE):
                    if found := world.signs():
                        moves.look(found)

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
        told = json.dumps({"process": os.getpid(), **asdict(moved)})
        environment = {BEGUN: str(int(os.environ.get(BEGUN, 0)) + 1), MOVED: told}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})
