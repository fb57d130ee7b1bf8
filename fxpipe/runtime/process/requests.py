"""Signals as requests: SIGINT, SIGTERM and the like ask a run to stop; a second one, to stop at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Stopped(SystemExit):
    """A signal ended the run; the exit code is 128 + its number."""


@contextmanager
def heeding(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, signals are the handler's. Those that the process ignores it goes on ignoring (`nohup`); and in a thread
    other than the main one, which gets none, nothing changes."""
    main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in SIGNALS} if main else {}
    before = {number: old for number, old in found.items() if old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def give_up(number: int) -> NoReturn:
    """Do what a signal asked for, now that all is put in order.

    Raises:
        KeyboardInterrupt: it was Ctrl-C.
        Stopped: it was another one.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Stopped(128 + number)


class StopRequests:
    """Inside, signals only count (see `heeding`).

    Attributes:
        asked: the signals so far.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._heeding = ExitStack()

    def __enter__(self) -> StopRequests:
        self._heeding.enter_context(heeding(self._ask))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._heeding.close()
        if self.asked and kind is None:  # it came too late to stop anything, but it was meant
            self.give_up()

    def give_up(self) -> NoReturn:
        """Do what the first signal asked for (see the function)."""
        give_up(self.asked[0])

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.asked.append(number)
