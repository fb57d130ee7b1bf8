"""What engines keep in a build, each with its digest beside it: what was changed since is never run.

The files are code: libraries, sources, pickled graphs. Nobody has a reason to edit them, and a library with a wrong
byte ends the process. So, unlike an edited stage, what was changed is not run: it is made again.
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
    """Whether a file or folder of the cache is what was recorded."""
    try:
        return _record_of(kept).read_text(encoding="ascii", errors="replace") == _digest(kept)
    except OSError:
        return False


def record(kept: Path) -> None:
    """Write the digest of what was made, if it is there and could be kept."""
    with contextlib.suppress(OSError):
        if kept.exists():
            write_whole(_record_of(kept), _digest(kept).encode())


def remove(kept: Path) -> bool:
    """Remove a file or folder; whether it is gone."""
    if kept.is_dir() and not kept.is_symlink():
        shutil.rmtree(kept, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            kept.unlink()
    return not kept.exists()


def names_of(kept: str) -> tuple[str, str]:
    """The names in the cache that belong to what is kept under a name: its own, and that of its digest."""
    return kept, kept + DIGEST


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of the cache so that no process ever sees half of it; if it cannot be written, do without."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(content)


def _record_of(kept: Path) -> Path:
    return kept.with_name(kept.name + DIGEST)


def _digest(kept: Path) -> str:
    """Of all files, by their places in it."""
    found = hashlib.sha256()
    for file in _files(kept):
        found.update(f"{file.relative_to(kept).as_posix()}\0".encode(errors="surrogateescape"))
        with file.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


def _files(kept: Path) -> Iterator[Path]:
    """All but what torch leaves there when it loads: locks, and bytecode."""
    if not kept.is_dir():
        yield kept
        return
    for path in sorted(kept.rglob("*")):
        if not path.is_dir() and path.suffix != ".lock" and path.parent.name != "__pycache__":
            yield path
