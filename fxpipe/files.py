"""Files and folders that are written as a whole or not at all, and checked before any work; detection of replaced
files."""

from __future__ import annotations

import errno
import hashlib
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
"""Linux's AT_FDCWD and RENAME_EXCHANGE."""

_TEMPORARY = re.compile(r"\.?(?P<name>.+)\.(?P<host>[^.]+)\.(?P<process>\d+)\.tmp")


def host_of_processes() -> str:
    """This host's name, and if there is one the namespace of its process ids: a container has its own."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def process_began(pid: int) -> str:
    """What distinguishes a process from a later one with its id: the boot and the time since; '' if there is none.

    "unknown" if the system does not say when it began.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        state, *fields = status.rpartition(")")[2].split()
        return "" if state == "Z" else f"{boot} {fields[18]}"  # field 22 of proc(5); a zombie writes nothing
    except (OSError, IndexError):  # not Linux; or it is gone, or hidden from us
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except (OSError, OverflowError):  # another user's process; or an impossible number
        pass
    return "unknown"


_HOST = re.sub(r"[^\w-]+", "-", host_of_processes()).strip("-")


def check_creatable(needed: Path, asked: Path, option: str) -> None:
    """Refuse a folder that cannot be created or written to; errors name it as the user did (`asked`, `option`).

    Raises:
        BuildError: a file has its name, or permission is missing.
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
    """A new folder next to `folder` that takes its place if all goes well, and is deleted otherwise.

    Raises:
        BuildError: writing to the disk fails.
    """
    with disk_explained(folder, hint), next_to(folder) as fresh:
        yield fresh
        put(fresh, folder)


@contextmanager
def disk_explained(folder: Path, hint: str) -> Iterator[None]:
    """Inside, an OSError is an error of writing the folder.

    Raises:
        BuildError: in its place.
    """
    try:
        yield
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror or error}", hint=hint) from error


@contextmanager
def next_to(folder: Path) -> Iterator[Path]:
    """A new folder next to `folder`; afterwards it is deleted, unless it has been `put` there.

    Raises:
        OSError: the disk does not accept it.
    """
    target = folder.resolve()
    fresh = temporary(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent)
        fresh.mkdir(mode=0o700)
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def put(fresh: Path, folder: Path) -> None:
    """Put a folder that is next to another in the other's place.

    On Linux the two swap names in one step: after a kill, either the old or the new folder exists. Elsewhere, and on
    file systems that cannot swap, a kill can leave the old one under another name (see `remove_abandoned`).

    Raises:
        OSError: the disk does not accept it.
    """
    target = folder.resolve()
    fresh.chmod(0o755)
    if not target.exists() or not exchange(fresh, target):
        _replace(fresh, target, temporary(target.with_name(f"{target.name}.old")))


def exchange(one: Path, other: Path) -> bool:
    """Give each of two paths of a file system the other's name, in one step; False where the system cannot.

    Only Linux can: `renameat2` with RENAME_EXCHANGE, and not on every file system.

    Raises:
        OSError: it can, but not these two.
    """
    import ctypes  # here, because most commands replace nothing

    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # an older C library
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _replace(fresh: Path, target: Path, old: Path) -> None:
    """Move a folder to its place, in two steps if the place is taken; after an error the old one is back."""
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
    """Which files existed at one moment, by the metadata of the file system; their content is not read.

    Attributes:
        identities: by path: device, inode, size, time of the last write, time of the last change; None for no file.
    """

    identities: dict[Path, tuple[int, ...] | None]

    @staticmethod
    def of(paths: Iterable[Path]) -> Snapshot:
        """Take it."""
        return Snapshot({path: _identity(path) for path in paths})

    def changed(self) -> list[Path]:
        """The files that were written, replaced or removed since."""
        return [path for path, identity in self.identities.items() if _identity(path) != identity]


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def digest(path: Path) -> str:
    """The SHA-256 of what is in a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def temporary(path: Path) -> Path:
    """The path of a file or folder while it is written: next to `path`, with host and process in its name."""
    return path.with_name(f".{path.name}{owned()}")


def owned() -> str:
    """The end of the name of a file or folder that is to go when this process has ended (see `remove_abandoned`)."""
    return f".{_HOST}.{os.getpid()}.tmp"


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write that replaces `path` if all goes well; else `path` stays unchanged.

    It is synced to disk before it gets its name: after a loss of power the old or the new file exists.

    Raises:
        OSError: writing to the disk fails.
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
    with suppress(OSError):  # some file systems cannot sync
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on disk.

    Raises:
        OSError: the disk does not accept them.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Remove what processes of this host that are gone have left in a folder (see `temporary` and `owned`).

    A folder that such a process had only renamed (see `replacing`) gets its name again.
    """
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            match = _TEMPORARY.fullmatch(path.name)
            if match is None or match["host"] != _HOST or process_began(int(match["process"])):
                continue
            place = folder / match["name"].removesuffix(".old")
            if match["name"].endswith(".old") and path.is_dir() and not place.exists():
                path.rename(place)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
