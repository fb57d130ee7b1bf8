"""A run that is saved stops politely: the first signal asks for a last checkpoint, the second ends it at once."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fxpipe.messages import say, warn
from fxpipe.runtime.process.requests import give_up, heeding


class PoliteStop:
    """What was asked of a process.

    Attributes:
        asked: the signal that asked it to stop; None before.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._last: tuple[int, Path | None] | None = None

    def listening(self) -> AbstractContextManager[None]:
        """Inside, signals ask (see `heeding`)."""
        return heeding(self._ask)

    def saved(self, step: int, path: Path | None) -> None:
        """The last checkpoint is over; called in any thread."""
        self._last = (step, path)

    def give_up_if_saved(self) -> None:
        """Stop, if the last checkpoint is over.

        Raises:
            KeyboardInterrupt: it was Ctrl-C that asked.
            Stopped: it was another signal.
        """
        if self._last is None or self.asked is None:
            return
        say_stopped(*self._last)
        give_up(self.asked)

    def exit(self) -> NoReturn:
        """End the process as the signal would have."""
        os._exit(128 + (self.asked or signal.SIGTERM))

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.asked is not None:
            self.exit()
        self.asked = number


def say_stopped(step: int, saved: Path | None) -> None:
    """Tell the user where a run that was asked to stop goes on."""
    if saved is None:
        warn(f"the run stops, and its last checkpoint, at step {step}, could not be written")
    else:
        say(f"stopped; saved after step {step} in {saved}: go on with --resume")
