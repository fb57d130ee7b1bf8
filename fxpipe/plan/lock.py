"""One writer a folder: a lock file that says who writes there, and that no one's death leaves shut.

A writer that was killed cannot take its lock away. So the file names the process, and whoever finds that this process
is gone takes the lock over. Of a process on another host nobody here can say whether it is gone.
"""

from __future__ import annotations

import dataclasses
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

try:
    import fcntl
except ImportError:  # pragma: no cover (not on POSIX)
    fcntl = None  # type: ignore[assignment]

_held: dict[Path, int] = {}
"""The locks of this process, by how many times it has taken each."""


@dataclass(frozen=True)
class LockHolder:
    """Who holds a lock.

    Attributes:
        host: its name; where the system has them, the namespace of process ids too, since a container has its own.
        started: what tells the process from a later one with its id: the boot of the machine and the moment in it.
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
        """Whether it has ended for certain: only of processes that this one could see."""
        return self.host == host_of_processes() and process_began(self.pid) not in (self.started, "unknown")


def run_lock(out: str | Path) -> Path:
    """The lock of a run's output folder: in it."""
    return Path(out).resolve() / ".fxpipe.lock"


def build_lock(folder: str | Path) -> Path:
    """The lock of a folder that is replaced as a whole, such as a build: beside it."""
    target = Path(folder).resolve()
    return target.with_name(f".{target.name}.fxpipe.lock")


@contextmanager
def locked(lock: Path, folder: str | Path, option: str) -> Iterator[None]:
    """Inside, this process alone writes into the folder. Folders that are made for the lock vanish if nothing comes.

    Args:
        lock: the file, see `run_lock` and `build_lock`. A process may take a lock again that it holds.
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
    """Make the folder of the lock; gives those that were not there, the innermost first."""
    missing = [parent for parent in (lock.parent, *lock.parents) if not parent.exists()]
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(lock, folder, option, error) from error
    return list(dict.fromkeys(missing))


def _take(lock: Path, folder: str | Path, option: str) -> int:
    """Take the lock, over from a process that is gone; gives the inode of the file."""
    while True:
        try:
            number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(lock, folder, option, error) from error
        with os.fdopen(number, "r+", encoding="utf-8", errors="replace") as file:
            # The lock is the text of the file. This other one, of the kernel, lasts while the text is read and written.
            with suppress(OSError):  # some file systems of clusters have none
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX)
            inode = os.fstat(file.fileno()).st_ino
            try:
                if lock.stat().st_ino != inode:
                    continue
            except OSError:  # released since
                continue
            if text := file.read():  # none: its writer was killed in this very block
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
