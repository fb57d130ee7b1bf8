"""Folders written whole or not at all, and refused before any work is done; files told from those that replace them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fxpipe.errors import BuildError


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
def replacing(folder: Path) -> Iterator[Path]:
    """A fresh folder beside `folder` that takes its place when all went well, and vanishes when it did not.

    Raises:
        BuildError: the disk says no.
    """
    target = folder.resolve()
    parent = target.parent
    fresh = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=parent))
        yield fresh
        fresh.chmod(0o755)
        old = fresh.with_name(fresh.name + "-old")
        if target.exists():
            target.rename(old)
        try:
            fresh.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror or error}", hint="choose another -o") from error
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)


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
