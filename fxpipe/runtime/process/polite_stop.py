"""A run that is saved stops politely: the first signal asks for a last checkpoint, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fxpipe.messages import say, warn
from fxpipe.runtime.process.requests import SIGNALS, Stopped


class PoliteStop:
    """What was asked of a process.

    Attributes:
        asked: the signal that asked it to stop; None before.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._last: tuple[int, Path | None] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, signals ask; not where the process ignores them, nor in a thread, which gets none."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

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
        raise KeyboardInterrupt if self.asked == signal.SIGINT else Stopped(128 + self.asked)

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
