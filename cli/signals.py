"""Ctrl-C and SIGTERM, handled before any slow import begins.

A signal during an import ends the process there, because the module could catch or change an exception. Temporary
folders are removed. At any other time it becomes a KeyboardInterrupt, so that code can clean up; a second signal ends
the process at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

_signals: list[int] = []
"""The signals so far."""

_over = False


def over() -> None:
    """The command has ended; only the interpreter has not."""
    global _over
    _over = True


def first_signal() -> int | None:
    """The first signal so far."""
    return _signals[0] if _signals else None


def heed_signals() -> None:
    """From now on SIGINT and SIGTERM end the command with at most one line; ignored ones stay ignored (`nohup`)."""
    sys.unraisablehook = _unraisable
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _heed)


def end_at_once() -> None:
    """From now on signals end this process at once: torchrun ends workers by signals, and a worker may wait in code in
    which no handler runs."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _heed:
            signal.signal(number, signal.SIG_DFL)


def _heed(number: int, frame: FrameType | None) -> None:
    _signals.append(number)
    if _over or len(_signals) > 1 or _imports(frame):
        leave(number)
    raise KeyboardInterrupt


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def leave(number: int) -> NoReturn:
    """End this process here."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    show_cursor = b"\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else b""
    if not _over:
        with contextlib.suppress(OSError):
            os.write(2, show_cursor + b"interrupted\n")
    try:
        atexit._run_exitfuncs()
    finally:
        os._exit(128 + number)


def _unraisable(unraisable: Any) -> None:
    """Python drops an exception of a finalizer or a callback; an interrupt must not be lost there."""
    if _signals and issubclass(unraisable.exc_type, KeyboardInterrupt):
        leave(_signals[-1])
    sys.__unraisablehook__(unraisable)
