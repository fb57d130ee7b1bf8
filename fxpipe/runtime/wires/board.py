"""What the processes of a run say to each other that is no tensor: texts by key, on a board that all of them see.

    one machine:    a file for each text, in a folder of the run in TMPDIR; its launcher sees them, too
    torchrun:       keys of the process group's store
    one process:    a dict

A run of days says much: who knows that all have read a text forgets it. Imports no torch, as the launcher does not.
"""

from __future__ import annotations

import errno
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from fxpipe.errors import RunError
from fxpipe.files import owned, remove_abandoned
from fxpipe.messages import warn

SUMMARY = "summary"
"""The key of the run's summary, as JSON."""

ASKED, MOVE = "asked", "move"
"""The key of a text that asks the run to stop after one more checkpoint, and what its content begins with if the run
then begins again under other cuts: the number of their build follows."""

TIMES = "times-{}"
"""The key of what a process has noted of its messages (see `measured_links`)."""

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between the first two looks for texts that are on their way; each pause is twice the last, up to the most."""

RETRY = 1.0
"""Seconds between two attempts to write to a full disk."""

FULL = (errno.ENOSPC, errno.EDQUOT)


class Board(ABC):
    """Texts by key. Where a store has them, every call raises RuntimeError once the store is gone."""

    @abstractmethod
    def set(self, key: str, text: str, patient: bool = True) -> None:
        """Write a text, or replace it. If the disk is full, a patient call warns, and waits until there is space.

        Raises:
            OSError: the disk does not take it.
        """

    @abstractmethod
    def all(self, keys: Sequence[str]) -> list[str] | None:
        """All of these texts; None until all are there."""

    @abstractmethod
    def forget(self, keys: Sequence[str]) -> None:
        """Remove these, where they are there: no process will read them again."""

    def get(self, key: str) -> str | None:
        """A text; None if it is not there."""
        texts = self.all([key])
        return None if texts is None else texts[0]

    def wait(self, keys: Sequence[str], most: float = inf) -> list[str]:
        """Wait until all of these texts are there. TimeoutError if they are not, after so many seconds."""
        until, pause = monotonic() + most, FIRST_PAUSE
        while (texts := self.all(keys)) is None:
            if monotonic() >= until:
                raise TimeoutError
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return texts


class DictBoard(Board):
    """Of one process, whose threads use it."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def set(self, key: str, text: str, patient: bool = True) -> None:
        self._texts[key] = text

    def all(self, keys: Sequence[str]) -> list[str] | None:
        texts = [text for key in keys if (text := self._texts.get(key)) is not None]
        return texts if len(texts) == len(keys) else None

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._texts.pop(key, None)


class FolderBoard(Board):
    """For the processes of a run on one machine, and their launcher. torch's `FileStore` never removes anything. Only
    its owner can read the folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def set(self, key: str, text: str, patient: bool = True) -> None:
        for attempt in count():
            try:
                self._write(self._file(key), text)
                return
            except OSError as error:
                if not patient or error.errno not in FULL:
                    raise
                if not attempt:
                    warn(f"the disk of {self.path} is full: the run waits until there is space")
                sleep(RETRY)

    def _write(self, file: Path, text: str) -> None:
        unfinished = file.with_name(f"{file.name}.{os.getpid()}.tmp")  # replicas may write the same text
        try:
            unfinished.touch(0o600)
            unfinished.write_text(text)
            os.replace(unfinished, file)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def all(self, keys: Sequence[str]) -> list[str] | None:
        try:
            return [self._file(key).read_text() for key in keys]
        except FileNotFoundError:
            return None

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(OSError):
                self._file(key).unlink()

    def _file(self, key: str) -> Path:
        return self.path / key.replace("/", "-")


class StoreBoard(Board):
    """In a store of torch: the process group's, for processes that torchrun has started."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, text: str, patient: bool = True) -> None:
        self._store.set(key, text)

    def all(self, keys: Sequence[str]) -> list[str] | None:
        if not self._store.check(keys):
            return None
        return [text.decode() for text in self._store.multi_get(keys)]

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def first(self, key: str) -> bool:
        """Whether no other process has called this with the same key before; False if the store is gone."""
        with suppress(RuntimeError):
            return bool(self._store.add(key, 1) == 1)
        return False


def make_folder(room: int) -> tempfile.TemporaryDirectory[str]:
    """A new folder in TMPDIR that only this user can read, as a context. Those of killed processes are removed. It has
    room for so many bytes.

    Raises:
        RunError: TMPDIR has no such folder.
    """
    try:
        folder = tempfile.TemporaryDirectory(owned(), "fxpipe_run_", ignore_cleanup_errors=True)
        remove_abandoned(Path(folder.name).parent)
        with tempfile.TemporaryFile() as probe:
            probe.write(bytes(room))
            probe.flush()
    except OSError as error:
        raise RunError(
            f"{tempfile.tempdir or 'TMPDIR'} cannot be written: {error.strerror or error}",
            hint=f"processes exchange files there: free {room >> 10} KiB, or set TMPDIR to a folder with room",
        ) from error
    return folder
