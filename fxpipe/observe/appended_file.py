"""A file that grows while a run trains; a failed write does not end the run."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from time import monotonic
from typing import Any

from fxpipe.messages import warn

RETRY = 1.0
"""Seconds until a failed write is tried again, and between two checks that the file still exists."""
HELD = 4 << 20
"""The most bytes that wait to be written; beyond that, the oldest are lost."""
_CHUNK = 1 << 20


class AppendedFile:
    """Appends pieces to a file, lines or other records, each at once.

    If that fails (the disk is full, the folder is gone), a warning says so, once; the piece is held and tried again
    later. A file that was deleted is made again, with all that was in it. One thread may write while another syncs, and
    does not wait for the disk.

    Args:
        path: the file; its folder must exist.
        fresh: forget what is in it.

    Attributes:
        late: how many pieces could not be written at first.
        lost: how many never were.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, fresh: bool = True) -> None:
        self.path = path
        self.late = self.lost = 0
        self.empty = True
        self._held: deque[bytes] = deque()
        self._size = 0  # of what is held
        self._again = 0.0  # when to try it again
        self._looked = monotonic()
        self._failing = False
        self._lock = threading.Lock()  # of all that is above
        self._descriptor = _opened(path, os.O_TRUNC if fresh else 0)

    def write(self, piece: bytes) -> None:
        """Append a piece; never raises."""
        with self._lock:
            self._held.append(piece)
            self._size += len(piece)
            self.empty = False
            self.late += self._failing
            while self._size > HELD and len(self._held) > 1:
                self._size -= len(self._held[1])  # of the first, a part may be written
                del self._held[1]
                self.lost += 1
            if monotonic() >= self._again:
                self._flush()

    def sync(self) -> None:
        """Sync all pieces so far to the disk, as far as possible."""
        try:
            with self._lock:
                if self._descriptor < 0:
                    return
                self._flush()
                own = os.dup(self._descriptor)  # the other may be closed meanwhile
            try:
                os.fsync(own)
            finally:
                os.close(own)
        except OSError as error:
            with self._lock:
                self._failed(error)

    def close(self) -> None:
        """Try held pieces a last time, and close the file if it is open; never raises."""
        with self._lock:
            if self._descriptor < 0:
                return
            self._look()
            self._flush()
            self.lost += len(self._held)
            self._held.clear()
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.close(descriptor)
            except OSError as error:
                self._failed(error)
        if self.lost:
            warn(f"{self.path}: {self.lost} line{'s are' if self.lost > 1 else ' is'} lost")

    @property
    def problems(self) -> list[dict[str, Any]]:
        """A summary's sentences on lines that were written late, or never: usually none."""
        lost = self.lost + len(self._held)
        return [{"file": self.path.name, "late": self.late, "lost": lost}] if self.late or lost else []

    def _flush(self) -> None:
        if monotonic() - self._looked >= RETRY:
            self._look()
        try:
            while self._held:
                piece = self._held[0]
                count = os.write(self._descriptor, piece)
                self._size -= count
                if count < len(piece):
                    self._held[0] = piece[count:]
                else:
                    self._held.popleft()
        except OSError as error:
            self._failed(error)
            return
        if self._failing:
            self._failing = False
            warn(f"{self.path} is written again")

    def _failed(self, error: OSError) -> None:
        self._again = monotonic() + RETRY
        if self._failing:
            return
        self._failing = True
        self.late += len(self._held)
        why = error.strerror or error
        warn(f"{self.path} cannot be written: {why}; training goes on, and its lines are kept and tried again")

    def _look(self) -> None:
        """Make the file again if it was deleted: writing to what has no name any more gives no error."""
        self._looked = monotonic()
        try:
            if os.fstat(self._descriptor).st_nlink:
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():  # another file has its name
                return
            fresh, at = _opened(self.path), 0
            while block := os.pread(self._descriptor, _CHUNK, at):
                at += os.write(fresh, block)
            os.close(self._descriptor)
            self._descriptor = fresh
            warn(f"{self.path} was deleted: it is made again, with all its lines")
        except OSError as error:
            self._failed(error)


def _opened(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | flags, 0o666)
