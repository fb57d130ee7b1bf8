"""Signals as requests: SIGINT, SIGTERM and the like ask a run to stop; a second one, to stop at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Stopped(SystemExit):
    """A signal ended the run; the exit code is 128 + its number."""


class StopRequests:
    """Inside, signals only count. Those that the process ignores it goes on ignoring (`nohup`); and in a thread other
    than the main one, which gets none, nothing changes.

    Attributes:
        asked: the signals so far.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in SIGNALS}
            self._before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
            for number in self._before:
                signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.asked and kind is None:  # it came too late to stop anything, but it was meant
            self.give_up()

    def give_up(self) -> NoReturn:
        """Do what the first signal asked for, now that all is put in order.

        Raises:
            KeyboardInterrupt: it was Ctrl-C.
            Stopped: it was another one.
        """
        if self.asked[0] == signal.SIGINT:
            raise KeyboardInterrupt
        raise Stopped(128 + self.asked[0])

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.asked.append(number)
