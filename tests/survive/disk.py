"""A disk that remembers what was asked of it, can fail, and can lose what it was not told to keep.

`Recorder` notes every call that changes a folder, in their order; `states` makes of the first so many of them what a
loss of power may leave. What counts as kept: the bytes of a file since its last fsync, the names in a folder since the
folder's. Of the rest any part may be there: none, all, half of a file, one name without another.
"""

from __future__ import annotations

import io
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fxpipe import files

Tree = dict[str, bytes | None]
"""What is in a folder, by relative path: a file's bytes, or None for a folder."""


@dataclass(frozen=True)
class Call:
    """One call; `kind` is mkdir, create, write, fsync, rename, exchange, unlink, rmdir, or mark: a note of a test."""

    kind: str
    path: str
    to: str = ""
    data: bytes = b""


class _Writer(io.FileIO):
    """A file without a buffer, whose every write is noted first and may fail after half of it."""

    recorder: Recorder

    def write(self, data: Any) -> int:
        held = bytes(data)
        place = self.recorder.relative(str(self.name))
        try:
            self.recorder.note(Call("write", place, data=held))
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


@dataclass(eq=False)
class _Node:
    """A file (`names` is None) or a folder: what the disk keeps, and what it was given since."""

    names: dict[str, _Node] | None
    data: bytes = b""
    pending: list[Any] = field(default_factory=list)  # of a file bytes, of a folder {name: node or None}


class Model:
    """A disk after so many calls."""

    def __init__(self) -> None:
        self.root = _Node({})

    def apply(self, call: Call) -> None:
        """One more."""
        if call.kind in ("mkdir", "create"):
            self._name(call.path, _Node({} if call.kind == "mkdir" else None))
        elif call.kind == "write":
            self._find(call.path).pending.append(call.data)
        elif call.kind == "fsync":
            node = self._find(call.path)
            self._settle(node, node.pending)
            node.pending = []
        elif call.kind == "rename":
            source, target = Path(call.path), Path(call.to)
            assert source.parent == target.parent, "only renames within a folder are atomic here"
            folder = self._find(str(source.parent))
            folder.pending.append({source.name: None, target.name: self._find(call.path)})
        elif call.kind == "exchange":
            one, other = Path(call.path), Path(call.to)
            assert one.parent == other.parent, "only changes within a folder are atomic here"
            names = {one.name: self._find(call.to), other.name: self._find(call.path)}
            self._find(str(one.parent)).pending.append(names)
        elif call.kind in ("unlink", "rmdir"):
            self._name(call.path, None)

    def unsettled(self) -> list[tuple[_Node, Any]]:
        """All that a loss of power may take: each change with the file or folder that it is in."""
        found: list[tuple[_Node, Any]] = []
        seen: set[int] = set()

        def walk(node: _Node) -> None:
            if id(node) in seen:
                return
            seen.add(id(node))
            found.extend((node, change) for change in node.pending)
            if node.names is None:
                return
            for child in [*node.names.values(), *(c for change in node.pending for c in change.values())]:
                if child is not None:
                    walk(child)

        walk(self.root)
        return found

    def tree(self, kept: Callable[[int], bool], torn: Callable[[int], bool] = lambda number: False) -> Tree:
        """What is there if of the unsettled changes those are kept, and of those of files half if torn."""
        changes = self.unsettled()
        chosen: dict[int, list[Any]] = {}
        for number, (node, change) in enumerate(changes):
            if kept(number):
                half = isinstance(change, bytes) and torn(number)
                chosen.setdefault(id(node), []).append(change[: len(change) // 2] if half else change)
        found: Tree = {}

        def walk(node: _Node, place: str) -> None:
            copy = _Node(None if node.names is None else dict(node.names), node.data)
            self._settle(copy, chosen.get(id(node), []))
            if place:
                found[place] = copy.data if copy.names is None else None
            for name, child in (copy.names or {}).items():
                walk(child, f"{place}/{name}" if place else name)

        walk(self.root, "")
        return found

    @staticmethod
    def _settle(node: _Node, changes: Iterable[Any]) -> None:
        for change in changes:
            if node.names is None:
                node.data += change
                continue
            for name, child in change.items():
                if child is None:
                    node.names.pop(name, None)
                else:
                    node.names[name] = child

    def _find(self, path: str) -> _Node:
        node = self.root
        for name in [] if path == "." else path.split("/"):
            now = _Node(dict(node.names or {}))
            self._settle(now, node.pending)
            assert now.names is not None
            node = now.names[name]
        return node

    def _name(self, path: str, node: _Node | None) -> None:
        place = Path(path)
        self._find(str(place.parent)).pending.append({place.name: node})


def states(calls: list[Call], draw: random.Random, samples: int) -> Iterator[tuple[int, Tree]]:
    """After each call, and before the first: what a loss of power may leave.

    All choices where few changes are unsettled; else none, all, all but each, each alone, every first few, and as many
    as `samples` at random; and each of them once more with halves of files. Without samples none and all alone.
    """
    model = Model()
    for done in range(len(calls) + 1):
        if done:
            model.apply(calls[done - 1])
        count = len(model.unsettled())
        everything = (1 << count) - 1
        masks = set(range(1 << count)) if 1 << count <= samples else {0, everything}
        if 1 << count > samples > 0:
            masks |= {1 << i for i in range(count)} | {everything & ~(1 << i) for i in range(count)}
            masks |= {(1 << i) - 1 for i in range(count)}
            masks |= {draw.getrandbits(count) for _ in range(samples)}
        for mask in sorted(masks):
            yield done, model.tree(lambda i, mask=mask: bool(mask >> i & 1))
            yield done, model.tree(lambda i, mask=mask: bool(mask >> i & 1), lambda i: True)


def lay(tree: Tree, folder: Path) -> None:
    """Make a folder of it."""
    for place, data in sorted(tree.items()):
        if data is None:
            (folder / place).mkdir()
        else:
            (folder / place).write_bytes(data)
