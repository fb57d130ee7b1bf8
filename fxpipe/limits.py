"""Limits of the system that a process may meet anywhere: what an error has to do with one, and what to do about it."""

from __future__ import annotations

import os
import resource

from fxpipe.errors import FxpipeError, RunError

FILES, FEW = 1024, 32
"""How many files a process may have open, if the system lets it: each worker has connections to others. With fewer than
the second number, no worker can begin."""

_MORE_FILES = "ulimit -n 4096 lets a process have more files open"
_HINTS = (
    (("Too many open files",), _MORE_FILES),
    (
        ("Resource temporarily unavailable", "can't start new thread"),
        "the system starts no more processes or threads for this user (ulimit -u): end others, or take fewer workers",
    ),
    (
        ("MemoryError: ", "Cannot allocate memory", "can't allocate memory", "failed to map segment", "bad_alloc"),
        "the system gives the process no more memory: ulimit -v says whether that is a limit; else end other programs, "
        "or take smaller batches",
    ),
)


def limit_hint(error: BaseException) -> str | None:
    """What to do about the limit that an error, or what has caused it, has met; None if it is about something else."""
    cause: BaseException | None = error
    while cause is not None:
        text = cause.what if isinstance(cause, FxpipeError) else f"{type(cause).__name__}: {cause}"
        for parts, hint in _HINTS:
            if any(part in text for part in parts) and "OutOfMemoryError" not in text:  # that is a device's
                return hint
        cause = cause.__cause__
    return None


def check_folder() -> None:
    """Refuse to begin in a working directory that was deleted.

    Raises:
        FxpipeError: it was.
    """
    try:
        os.getcwd()
    except OSError as error:
        hint = "cd to a folder that is there"
        raise FxpipeError(f"the working directory is gone: {error.strerror}", hint=hint) from None


def open_more_files() -> None:
    """Raise the number of files that this process, and those that it starts, may have open, where it is very low.

    Raises:
        RunError: it stays too low for any worker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft < most and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < FEW:
        raise RunError(f"a process may have only {most} files open, too few for a worker", hint=_MORE_FILES)
