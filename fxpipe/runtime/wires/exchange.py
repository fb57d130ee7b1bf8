"""Short texts that all workers of a run see, beside its messages.

A run of days writes many: whoever knows that all have read one forgets it.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any, Protocol

from fxpipe.messages import warn
from fxpipe.torch_private import default_store

RETRY = 1.0
"""Seconds until what a full disk did not take is tried again."""


class Exchange(Protocol):
    """Texts by key that all workers of a run see."""

    def set(self, key: str, text: str) -> None:
        """Write one."""

    def get(self, keys: list[str]) -> list[str] | None:
        """All of these, once all are there; None before. Does not wait."""

    def forget(self, keys: list[str]) -> None:
        """Remove these: nobody will ask for them again."""


class FolderExchange:
    """For the processes of a run on one machine: a file each. In torch's `FileStore` nothing ever goes away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def set(self, key: str, text: str) -> None:
        """Write one; waits, and says so, as long as the disk is full."""
        path = self._path(key)
        unfinished = path.with_name(f"{path.name}.tmp")
        for attempt in count():
            try:
                unfinished.write_text(text)
                os.replace(unfinished, path)
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not attempt:
                    warn(f"{self._folder} is on a disk that is full: the run waits until there is room")
                sleep(RETRY)

    def get(self, keys: list[str]) -> list[str] | None:
        try:
            return [self._path(key).read_text() for key in keys]
        except FileNotFoundError:
            return None

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            with suppress(OSError):
                self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


class StoreExchange:
    """In a store of torch's.

    Args:
        store: one of this process alone; None takes the process group's, for workers that torchrun has started.
    """

    def __init__(self, store: Any = None) -> None:
        self._store = default_store() if store is None else store

    def set(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def get(self, keys: list[str]) -> list[str] | None:
        if not self._store.check(keys):
            return None
        return [self._store.get(key).decode() for key in keys]

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)
