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

from fxpipe.files import replaced

DIGEST = ".sha256"


def is_intact(kept: Path) -> bool:
    """Whether a file or folder of the cache has its recorded digest."""
    try:
        return _record_of(kept).read_text(encoding="ascii", errors="replace") == _digest(kept)
    except OSError:
        return False


def record(kept: Path) -> None:
    """Write the digest of a file or folder, if it exists."""
    with contextlib.suppress(OSError):
        if kept.exists():
            write_whole(_record_of(kept), _digest(kept).encode())


def remove(kept: Path) -> bool:
    """Remove a file or folder; returns whether it is gone."""
    if kept.is_dir() and not kept.is_symlink():
        shutil.rmtree(kept, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            kept.unlink()
    return not kept.exists()


def names_of(kept: str) -> tuple[str, str]:
    """The names in the cache of a kept file or folder: its own, and its digest's."""
    return kept, kept + DIGEST


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of the cache so that no process ever sees half of it; ignore a failure."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(content)


def _record_of(kept: Path) -> Path:
    return kept.with_name(kept.name + DIGEST)


def _digest(kept: Path) -> str:
    """The digest of all its files and their paths."""
    found = hashlib.sha256()
    for file in _files(kept):
        found.update(f"{file.relative_to(kept).as_posix()}\0".encode(errors="surrogateescape"))
        with file.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


def _files(kept: Path) -> Iterator[Path]:
    """All files except those that torch writes when it loads: locks and bytecode."""
    if not kept.is_dir():
        yield kept
        return
    for path in sorted(kept.rglob("*")):
        if not path.is_dir() and path.suffix != ".lock" and path.parent.name != "__pycache__":
            yield path
