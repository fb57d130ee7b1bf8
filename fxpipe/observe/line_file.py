"""A file of JSON lines that a run writes while it trains: a new one, or the continuation of an earlier run's.

A line that cannot be written (the disk is full) is lost: a warning says so, once, and the run goes on.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from fxpipe.messages import warn
from fxpipe.typed_json import dumps


class LineFile:
    """Appends JSON objects to a file, each as a whole line or not at all; `anew` drops what is there. Its folder must
    exist.

    One thread may write while another syncs, and does not wait for the disk.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, anew: bool = True) -> None:
        self.path = path
        self.lost = 0  # how many lines could not be written
        self._failing = False
        self._lock = threading.Lock()  # of the descriptor; -1 when it is closed
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags | (os.O_TRUNC if anew else 0), 0o666)

    def write(self, row: dict[str, Any]) -> None:
        """Append a line, with null for numbers that are not finite; never raises."""
        line, count = dumps(row).encode() + b"\n", 0
        try:
            while count < len(line):
                count += os.write(self._descriptor, line[count:])
        except OSError as error:
            self.lost += 1
            self._failed(error)
            if count:  # a part of a line would spoil the next one
                with suppress(OSError):
                    os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - count)

    def sync(self) -> None:
        """Sync all lines so far to the disk, as far as possible."""
        with self._lock:
            if self._descriptor < 0:
                return
            own = os.dup(self._descriptor)  # the other may be closed meanwhile
        try:
            os.fsync(own)
        except OSError as error:
            self._failed(error)
        finally:
            os.close(own)

    def close(self) -> None:
        """Close the file, and remove it if it has no line; never raises."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            status = os.fstat(descriptor)
            os.close(descriptor)
            if not status.st_nlink:
                warn(f"{self.path} was deleted during the run: its lines are lost")
            elif not status.st_size:
                self.path.unlink()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            warn(f"{self.path} cannot be written: {error.strerror or error}; training goes on, and lines are lost")
