"""One writer per folder: a file that the kernel locks until its process ends, and a text next to it that names it."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from fxpipe.errors import BuildError
from fxpipe.files import replacing

_early: set[tuple[Path, int, int]] = set()
"""The locks that one more call may enter: the lock, the process and the thread of that call."""


def run_lock(out: str | Path) -> Path:
    """The lock of a run's output folder, inside it."""
    return Path(out).resolve() / ".fxpipe.lock"


def build_lock(folder: str | Path) -> Path:
    """The lock of a folder that is replaced as a whole, such as a build, next to it."""
    target = Path(folder).resolve()
    return target.with_name(f".{target.name}.fxpipe.lock")


@contextmanager
def locked(lock: Path, folder: str | Path, option: str, *, again: bool = False) -> Iterator[None]:
    """Inside, only this call writes into the folder. Folders made for the lock are removed if they stay empty.

    Args:
        lock: the file, see `run_lock` and `build_lock`.
        folder: as the user named it with `option`.
        again: one call inside, in this thread, may take the lock for itself: it does the work for which this one has
            taken it early.

    Raises:
        BuildError: another process writes there, or another call of this one; or the lock cannot be written.
    """
    call = lock, os.getpid(), threading.get_ident()
    if call in _early:
        _early.remove(call)
        try:
            yield
        finally:
            _early.add(call)
        return
    with _taken(lock, folder, option):
        if again:
            _early.add(call)
        try:
            yield
        finally:
            _early.discard(call)


@contextmanager
def replacing_alone(folder: Path) -> Iterator[Path]:
    """`fxpipe.files.replacing` under the folder's lock.

    Raises:
        BuildError: another process is replacing the folder, or it cannot be written.
    """
    with locked(build_lock(folder), folder, "-o"), replacing(folder) as fresh:
        yield fresh


@contextmanager
def _taken(lock: Path, folder: str | Path, option: str) -> Iterator[None]:
    """Inside, the lock is this call's."""
    missing = [parent for parent in lock.parents if not parent.exists()]
    process = f"{os.getpid()} on {socket.gethostname()}"
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
    holder = lock.with_suffix(".holder")
    with ExitStack() as held:
        held.callback(_remove_empty, missing)
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(lock, timeout=0, thread_local=False))
            held.callback(_remove, holder, lock, lock.stat().st_ino)
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            holder.write_bytes(f"{process}, {command}, since {since}\n".encode(errors="backslashreplace"))
        except Timeout:
            raise _refusal(holder, process, lock, folder, option) from None
        except OSError as error:
            what = f"{folder} cannot be written: {error.strerror or error}"
            raise BuildError(what, where=str(lock.parent), hint=f"choose another {option}") from error
        number = os.getpid()
        try:
            yield
        finally:
            if os.getpid() != number:  # this is a copy that os.fork has made
                held.pop_all()


def _refusal(holder: Path, process: str, lock: Path, folder: str | Path, option: str) -> BuildError:
    """Names the holder; it has written no text yet if it has taken the lock just now."""
    text = ""
    with suppress(OSError):
        text = holder.read_text(encoding="utf-8", errors="replace").strip()
    if text.startswith(f"{process}, "):
        what = f"{folder} is being written by this process, in another call"
        hint = f"wait until it ends, or close the pipeline that saves there; or choose another {option}"
    else:
        what = f"{folder} is being written by another process{text and f': {text}'}"
        hint = f"wait until it ends, or choose another {option}"
    return BuildError(what, where=str(lock), hint=hint)


def _remove(holder: Path, lock: Path, inode: int) -> None:
    """Remove a lock that is held: FileLock refuses a file without a name to those that have opened it before."""
    with suppress(OSError):  # the whole folder was deleted, and perhaps made again by another run
        if lock.stat().st_ino == inode:
            holder.unlink(missing_ok=True)
            lock.unlink()


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove new folders, the innermost first."""
    for folder in folders:
        with suppress(OSError):  # something was written into it
            folder.rmdir()
