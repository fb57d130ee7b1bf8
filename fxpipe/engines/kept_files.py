"""The files that engines keep in a build, each with a digest in another file: a changed file is never run.

The files are code: libraries, sources, pickled graphs. There is no reason to edit them, and a library with a wrong byte
ends the process. So, unlike an edited stage, a changed file is not run but made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from fxpipe.files import replaced

DIGEST = ".sha256"


def is_intact(entry: Path) -> bool:
    """Whether a file or folder of the cache has its recorded digest."""
    try:
        return _record_of(entry).read_text(encoding="ascii", errors="replace") == _digest(entry)
    except OSError:
        return False


def record(entry: Path) -> None:
    """Write the digest of a file or folder, if it exists."""
    with contextlib.suppress(OSError):
        if entry.exists():
            write_whole(_record_of(entry), _digest(entry).encode())


@contextlib.contextmanager
def made_once(entry: Path) -> Iterator[None]:
    """Inside, no other process of this machine makes the entry; they wait. Without an effect in a read-only cache."""
    lock = entry.with_name(f".{entry.name}.lock")
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):  # read-only, or a file system without locks
            lock.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(lock, thread_local=False))
            held.callback(lock.unlink, missing_ok=True)  # those that wait take the next file of this name
        yield


def remove(entry: Path) -> bool:
    """Remove a file or folder; returns whether it is gone."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()
    return not entry.exists()


def names_of(name: str) -> tuple[str, str]:
    """The names in the cache of a kept file or folder: its own, and its digest's."""
    return name, name + DIGEST


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of the cache so that no process ever sees half of it; ignore a failure."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(content)


def _record_of(entry: Path) -> Path:
    return entry.with_name(entry.name + DIGEST)


def _digest(entry: Path) -> str:
    """The digest of all its files and their paths."""
    digest = hashlib.sha256()
    for file in _files(entry):
        digest.update(f"{file.relative_to(entry).as_posix()}\0".encode(errors="surrogateescape"))
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _files(entry: Path) -> Iterator[Path]:
    """All files except those that torch writes when it loads: locks and bytecode."""
    if not entry.is_dir():
        yield entry
        return
    for path in sorted(entry.rglob("*")):
        if not path.is_dir() and path.suffix != ".lock" and path.parent.name != "__pycache__":
            yield path
