"""What fxpipe prints on stderr, and the filter for every text before a terminal shows it."""

from __future__ import annotations

import os
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

_DROPPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of control characters, of what formats text unseen (bidirectional controls too), of halves of
surrogate pairs, and of separators of lines and paragraphs."""


_began = os.sep


def begin_here() -> None:
    """The reader of the messages is in this process's working directory; user code may change that later."""
    global _began
    with suppress(OSError):  # it was deleted
        _began = os.path.join(os.getcwd(), "")


def from_here(text: str) -> str:
    """A text in which paths below the reader's working directory are relative to it."""
    return text if _began == os.sep else re.sub(rf"(?<![\w./-]){re.escape(_began)}(?=[^\s'\"])", "", text)


begin_here()


def plain(text: str) -> str:
    """A text of one line without control characters: names come from the user, and a terminal would obey them.

    It also has no characters that reorder or hide others (U+202E), and none that no encoding has.
    """
    if text.isprintable():
        return text
    return "".join(c for c in text if c.isprintable() or unicodedata.category(c) not in _DROPPED)


def plain_lines(text: str) -> str:
    """Like `plain`, line by line."""
    return "\n".join(map(plain, text.split("\n")))


def say(text: str) -> None:
    """Print a line on stderr; if stderr is closed or full, do nothing: no message is worth a run."""
    with suppress(OSError, ValueError):
        print(plain_lines(from_here(text)), file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """A warning on stderr (see `say`)."""
    say(f"warning: {message}")


class _WithoutThread:
    """An output stream that drops what the thread that made it writes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def silenced() -> Iterator[None]:
    """Inside, what this thread prints is dropped; other threads print their progress and errors as before."""
    with redirect_stdout(_WithoutThread(sys.stdout)), redirect_stderr(_WithoutThread(sys.stderr)):
        yield


_far: list[Callable[[], str]] = []


@contextmanager
def saying(text: Callable[[], str]) -> Iterator[None]:
    """Inside, `text` describes the progress of the work, for callers of `how_far`: a thread that shows it regularly."""
    _far.append(text)
    try:
        yield
    finally:
        _far.pop()


def how_far() -> str:
    """The progress of the innermost work; '' if there is none."""
    with suppress(IndexError):  # it ended just now
        return _far[-1]()
    return ""
