"""The user's own lines: in a stack, in a traceback, in the text of a message."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_HIDDEN = (os.path.dirname(torch.__file__) + os.sep, _HERE, "<")
_TRACING = _HERE + os.path.join("tracing", "capture.py")  # what called the step
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_TYPED = ("<stdin>", "<ipython-input", "<python-input")
_WITHIN = "\n  in: "  # between the user's line and the library's that it led to


@functools.cache
def _is_hidden(file: str) -> bool:
    """Whether a file is torch's, fxpipe's or Python's own."""
    hidden = file.startswith(_HIDDEN) or (file.startswith(_PYTHON) and not _INSTALLED.search(file))
    return hidden and not file.startswith(_TYPED)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame, from `frame` outwards, that is neither torch's nor fxpipe's nor Python's own."""
    while frame is not None and _is_hidden(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def outwards(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """The lines from a frame outwards, up to the caller of the step."""
    while frame is not None and frame.f_code.co_filename != _TRACING:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def is_within_users(frame: FrameType | None) -> bool:
    """Whether a line of the user's step, or of a library that it uses, leads to a frame."""
    return any(not _is_hidden(file) for file, _ in outwards(frame))


def stacked(lines: Iterable[tuple[str, int]]) -> str | None:
    """The user's line, as `file.py:12: the line`; if it leads into a library, the line there as well.

    Args:
        lines: file and number, the innermost first.
    """
    inner = None
    for file, line in lines:
        if _is_hidden(file):
            continue
        inner = inner or place(file, line)
        if not _INSTALLED.search(file):
            outer = place(file, line)
            return outer if outer == inner else f"{outer}{_WITHIN}{inner}"
    return inner


def is_library(where: str | None) -> bool:
    """Whether a place, as `stacked` writes it, is in a library that the user's line leads into."""
    return where is not None and _WITHIN in where


def user_traceback(error: BaseException) -> str | None:
    """Where an error was raised, as `stacked` writes it."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return stacked(reversed(lines))


def is_users(error: BaseException) -> bool:
    """Whether an error went through a line of the user's own files."""
    return any(is_own(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))


def user_stack(stack: str) -> str | None:
    """The same for the innermost frame of a printed stack, such as `stack_trace` in a node's metadata."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack)
    frames_of_user = [(file, int(line)) for file, line in frames if not _is_hidden(file)]
    return place(*frames_of_user[-1]) if frames_of_user else None


def is_installed(file: str | None) -> bool:
    """Whether a file is in an installed package other than torch."""
    return file is not None and bool(_INSTALLED.search(file)) and not _is_hidden(file)


def is_own(file: str | None) -> bool:
    """Whether a file is the user's own: not torch's, fxpipe's, Python's or an installed package's."""
    return file is not None and not _is_hidden(file) and not _INSTALLED.search(file)


def place(file: str, line: int) -> str:
    """`file.py:12: the line`; without the line if it cannot be read here."""
    return f"{short(file)}:{line}: {text(file, line)}".removesuffix(": ")


def definition(function: Callable[..., Any], name: str | None = None) -> str | None:
    """`file.py:12, in loss`: where a function is defined; None for a callable without Python code.

    Args:
        name: in place of its own.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else f"{short(code.co_filename)}:{code.co_firstlineno}, in {name or code.co_name}"


def short(file: str) -> str:
    """A file's name as its reader knows it: relative to where Python found it, else its base name; never absolute."""
    best = ""
    for entry in sys.path:
        prefix = os.path.abspath(entry) + os.sep
        if file.startswith(prefix) and len(prefix) > len(best):
            best = prefix
    return file[len(best) :] if best else os.path.basename(file)


def text(file: str, line: int) -> str:
    """The line's text, without its surrounding blanks."""
    return linecache.getline(file, line).strip()
