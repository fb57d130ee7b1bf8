"""One writer per folder: a lock file that names the writer, and that a killed writer does not leave locked.

A killed writer cannot remove its lock. So the file names the process, and a process that finds it gone takes the lock
over. Whether a process on another host is gone cannot be known here.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fxpipe.errors import BuildError
from fxpipe.files import host_of_processes, process_began, replacing
from fxpipe.typed_json import read

_held: dict[Path, int] = {}
"""The locks of this process, each with the number of times it has been taken."""


@dataclass(frozen=True)
class LockHolder:
    """The holder of a lock.

    Attributes:
        host: its name; and, if the system has them, the namespace of process ids, since a container has its own.
        started: distinguishes the process from a later one with its id: the boot of the machine and the time since.
        since: when it took the lock, in ISO 8601.
    """

    host: str
    pid: int
    started: str
    command: str
    since: str

    @staticmethod
    def own() -> LockHolder:
        """This process."""
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return LockHolder(host_of_processes(), os.getpid(), process_began(os.getpid()), command, now)

    @property
    def gone(self) -> bool:
        """Whether it has certainly ended: only for processes that this one can see, or has been (`os.exec`)."""
        ended = process_began(self.pid) not in (self.started, "unknown")
        return self.host == host_of_processes() and (ended or self.pid == os.getpid())


def run_lock(out: str | Path) -> Path:
    """The lock of a run's output folder, inside it."""
    return Path(out).resolve() / ".fxpipe.lock"


def build_lock(folder: str | Path) -> Path:
    """The lock of a folder that is replaced as a whole, such as a build, next to it."""
    target = Path(folder).resolve()
    return target.with_name(f".{target.name}.fxpipe.lock")


@contextmanager
def locked(lock: Path, folder: str | Path, option: str) -> Iterator[None]:
    """Inside, only this process writes into the folder. Folders made for the lock are removed if they stay empty.

    Args:
        lock: the file, see `run_lock` and `build_lock`. A process may take its lock again.
        folder: as the user named it with `option`.

    Raises:
        BuildError: another process writes there, or the lock cannot be written.
    """
    if lock in _held:
        _held[lock] += 1
        try:
            yield
        finally:
            _held[lock] -= 1
        return
    made = _make(lock, folder, option)
    try:
        identity = _take(lock, folder, option)
        _held[lock] = 1
        try:
            yield
        finally:
            del _held[lock]
            _release(lock, identity)
    finally:
        for created in made:
            with suppress(OSError):  # something was written into it
                created.rmdir()


@contextmanager
def replacing_alone(folder: Path) -> Iterator[Path]:
    """`fxpipe.files.replacing` under the folder's lock.

    Raises:
        BuildError: another process is replacing the folder, or it cannot be written.
    """
    with locked(build_lock(folder), folder, "-o"), replacing(folder) as fresh:
        yield fresh


def _make(lock: Path, folder: str | Path, option: str) -> list[Path]:
    """Make the folder of the lock; returns the new folders, the innermost first."""
    missing = [parent for parent in (lock.parent, *lock.parents) if not parent.exists()]
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(lock, folder, option, error) from error
    return list(dict.fromkeys(missing))


def _take(lock: Path, folder: str | Path, option: str) -> int:
    """Take the lock, also from a process that is gone; returns the inode of the file."""
    while True:
        try:
            number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(lock, folder, option, error) from error
        with os.fdopen(number, "r+", encoding="utf-8", errors="replace") as file:
            # The lock is the text of the file. The kernel's lock here only protects reading and writing the text.
            with suppress(OSError):  # some file systems of clusters do not have it
                fcntl.flock(file, fcntl.LOCK_EX)
            inode = os.fstat(file.fileno()).st_ino
            try:
                if lock.stat().st_ino != inode:
                    continue
            except OSError:  # released since
                continue
            if text := file.read():  # empty: its writer was killed in this block
                _refuse_held(text, lock, folder, option)
            try:
                file.seek(0)
                file.truncate()
                file.write(json.dumps(dataclasses.asdict(LockHolder.own()), indent=1) + "\n")
                file.flush()
            except OSError as error:
                lock.unlink(missing_ok=True)
                raise _unwritable(lock, folder, option, error) from error
            return inode


def _refuse_held(text: str, lock: Path, folder: str | Path, option: str) -> None:
    """Refuse if the holder that the text names may still be at work."""
    remove = f"if no process writes there, delete {lock}"
    holder = read(text, LockHolder, where=str(lock), error=BuildError, hint=remove)
    if holder.gone:
        return
    here = holder.host == host_of_processes()
    raise BuildError(
        f"{folder} is being written by another process: {holder.pid} on {holder.host.partition(' ')[0]}, "
        f"{holder.command}, since {holder.since}",
        where=str(lock),
        hint=f"wait until it ends, or choose another {option}" + ("" if here else f"; {remove}"),
    )


def _release(lock: Path, inode: int) -> None:
    with suppress(OSError):  # the whole folder was deleted
        if lock.stat().st_ino == inode:
            lock.unlink()


def _unwritable(lock: Path, folder: str | Path, option: str, error: OSError) -> BuildError:
    what = f"{folder} cannot be written: {error.strerror or error}"
    return BuildError(what, where=str(lock.parent), hint=f"choose another {option}")
