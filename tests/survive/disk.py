"""A disk that remembers what was asked of it, and can fail."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fxpipe import files


@dataclass(frozen=True)
class Call:
    """One call; `kind` is mkdir, create, write, fsync, rename, exchange, unlink, rmdir, or mark: a note of a test."""

    kind: str
    path: str
    to: str = ""


class _Writer(io.FileIO):
    """A file without a buffer, whose every write is noted first and may fail after half of it."""

    recorder: Recorder

    def write(self, data: Any) -> int:
        held = bytes(data)
        place = self.recorder.relative(str(self.name))
        try:
            self.recorder.note(Call("write", place))
        except OSError:
            super().write(held[: len(held) // 2])
            raise
        while held:
            held = held[super().write(held) :]
        return len(bytes(data))


class Recorder:
    """Notes the calls under a folder.

    Attributes:
        calls: so far.
        fail: asked before each, with its number and itself; an error that it returns is raised in its place.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.calls: list[Call] = []
        self.fail: Callable[[int, Call], OSError | None] = lambda number, call: None
        self._lock = threading.Lock()

    def note(self, call: Call) -> None:
        with self._lock:
            error = self.fail(len(self.calls), call)
            if error is None:
                self.calls.append(call)
        if error is not None:
            raise error

    def relative(self, path: Any, folder: int | None = None) -> str | None:
        """The path under the root; None if it is elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        whole = Path(os.path.abspath(os.path.join(os.readlink(f"/proc/self/fd/{folder}") if folder else "", path)))
        return str(whole.relative_to(self.root)) if whole.is_relative_to(self.root) else None

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Note what this process does."""
        with pytest.MonkeyPatch.context() as patch:
            for kind in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
                patch.setattr(os, kind, self._noted(kind, getattr(os, kind)))
            patch.setattr(Path, "open", self._open(Path.open))
            patch.setattr(files, "exchange", self._exchange(files.exchange))
            yield self

    def _noted(self, kind: str, real: Any) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            place = self.relative(path, options.get("dir_fd"))
            if place is None:
                return real(path, *args, **options)
            found = Call(kind, place, (self.relative(args[0]) or "") if kind == "rename" else "")
            if kind == "mkdir" and os.path.lexists(path):  # it will only say that it is there
                return real(path, *args, **options)
            if kind == "mkdir" and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
                return real(path, *args, **options)
            self.note(found)
            return real(path, *args, **options)

        return call

    def _exchange(self, real: Any) -> Any:
        def call(one: Path, other: Path) -> bool:
            done: bool = real(one, other)
            if done:
                self.note(Call("exchange", str(self.relative(one)), str(self.relative(other))))
            return done

        return call

    def _open(self, real: Any) -> Any:
        def call(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            place = self.relative(path)
            if place is None or mode != "wb":
                assert place is None or not set("wax+") & set(mode), f"{path} opened with {mode!r}: not recorded"
                return real(path, mode, *args, **options)
            self.note(Call("create", place))
            file = _Writer(str(path), "w")
            file.recorder = self
            return file

        return call
