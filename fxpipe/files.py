"""Files and folders written whole or not at all, and refused before any work is done; files told from those that
replace them."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fxpipe.errors import BuildError

_HERE, _EXCHANGE = -100, 2
"""Of Linux: AT_FDCWD and RENAME_EXCHANGE."""

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)\.(?P<process>\d+)\.tmp")


def host_of_processes() -> str:
    """This host's name, and where there are such the namespace of its process ids: a container has its own."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def process_began(pid: int) -> str:
    """What tells a process from a later one with its id: the boot and the moment in it; '' if there is none.

    Where the system does not say when it began, "unknown".
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        state, *fields = status.rpartition(")")[2].split()
        return "" if state == "Z" else f"{boot} {fields[18]}"  # field 22 of proc(5); a zombie writes nothing any more
    except (OSError, IndexError):  # not Linux; or it is gone, or hidden from us
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except (OSError, OverflowError):  # there is one, of another user; or no such number here
        pass
    return "unknown"


_HOST = re.sub(r"[^\w-]+", "-", host_of_processes()).strip("-")


def check_creatable(needed: Path, asked: Path, option: str) -> None:
    """Refuse a folder that cannot be created or written to; the errors call it as the user `asked` with `option`.

    Raises:
        BuildError: a file stands in its way, or permission is missing.
    """
    existing = needed
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        reason = f"{existing.name} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = f"no permission to write in {existing}"
    else:
        return
    raise BuildError(f"{asked} cannot be written: {reason}", hint=f"choose another {option}")


@contextmanager
def replacing(folder: Path, hint: str = "choose another -o") -> Iterator[Path]:
    """A fresh folder beside `folder` that takes its place when all went well, and vanishes when it did not.

    On Linux the two change names in one step: whoever is killed, there is the old folder or the new one. Elsewhere, and
    on file systems that cannot do that, a kill can leave the old one moved aside (see `remove_abandoned`).

    Raises:
        BuildError: the disk says no.
    """
    target = folder.resolve()
    fresh, old = temporary(target), temporary(target.with_name(f"{target.name}.old"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent)
        fresh.mkdir(mode=0o700)
        yield fresh
        fresh.chmod(0o755)
        if not target.exists() or not exchange(fresh, target):
            _replace(fresh, target, old)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror or error}", hint=hint) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Give each of two paths of a file system the other's name, in one step; False where the system cannot.

    Linux alone can: `renameat2` with RENAME_EXCHANGE, and not on every file system.

    Raises:
        OSError: it can, but not these two.
    """
    import ctypes  # here, because most commands replace nothing

    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # a C library from before
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _replace(fresh: Path, target: Path, old: Path) -> None:
    """Move a folder to its place, in two steps where there is one already; after an error that one is there again."""
    if target.exists():
        target.rename(old)
    try:
        fresh.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class Snapshot:
    """Which files were there at one moment, by what the file system says of them; their content is not read.

    Attributes:
        identities: by path: device, inode, size, time of the last write, time of the last change; None for no file.
    """

    identities: dict[Path, tuple[int, ...] | None]

    @staticmethod
    def of(paths: Iterable[Path]) -> Snapshot:
        """Take it."""
        return Snapshot({path: _identity(path) for path in paths})

    def changed(self) -> list[Path]:
        """Those that were written, replaced or removed since."""
        return [path for path, identity in self.identities.items() if _identity(path) != identity]


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def temporary(path: Path) -> Path:
    """Where what comes to `path` is while it is written: beside it, with the host and the process in its name."""
    return path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.tmp")


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when all went well; else `path` stays as it was.

    It is on the disk itself before it gets its name: after a loss of power there is the old file or the new one.

    Raises:
        OSError: the disk says no.
    """
    fresh = temporary(path)
    try:
        with fresh.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems cannot do that
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the disk has the names in a folder.

    Raises:
        OSError: the disk does not take them.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Remove what processes of this host that are gone left half written in a folder (see `temporary`).

    A folder that such a process had only moved aside (see `replacing`) gets its place again.
    """
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            found = _TEMPORARY.fullmatch(path.name)
            if found is None or found["host"] != _HOST or process_began(int(found["process"])):
                continue
            place = folder / found["name"].removesuffix(".old")
            if found["name"].endswith(".old") and path.is_dir() and not place.exists():
                path.rename(place)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
