"""Keeps what a step reaches in Python (attributes, globals, closures, containers), and tells what the step changed."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from fxpipe.tracing.holders import LISTS, PLAIN, Content, Holder, Members
from fxpipe.tracing.reach import reached

_INTERNAL = frozenset(nn.Module().__dict__)  # of a module; its hooks are among them
_MISSING = object()

Snapshot = list[tuple[Holder, Content]]


class Change(NamedTuple):
    """What the step made of a value that it can reach.

    Attributes:
        kind: 'value' of a number, a text or the like; 'size' of a container; 'object' for anything else.
    """

    holder: Holder
    key: Any
    kind: Literal["value", "size", "object"]
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.kind == "size":
            return f"{self.holder.name} ({self.old} → {self.new} elements)"
        name = self.holder.call(self.key)
        if self.kind == "object" or any(isinstance(value, bytes) for value in (self.old, self.new)):
            return name
        return f"{name} ({_shown(self.old)} → {_shown(self.new)})"


class PythonState:
    """All that a step can reach in Python.

    Args:
        functions: the step's; the model's own code is looked into anyway.
    """

    def __init__(self, model: nn.Module, functions: Sequence[Callable[..., Any]] = ()) -> None:
        self.model = model
        self.holders = reached(model, functions)

    def snapshot(self) -> Snapshot:
        return [(holder, holder.read()) for holder in self.holders]

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Afterwards everything holds the same objects as before; the values of tensors are not kept."""
        before = self.snapshot()
        try:
            yield
        finally:
            for holder, content in before:
                if not _same(holder.read(), content):
                    holder.write(content)

    def name_of(self, value: Any) -> str | None:
        """How the user writes a value that something holds; None if nothing known does."""
        for holder in self.holders:
            for key, held in holder.read().items():
                if held is value:
                    return re.sub(r"\._(?:parameters|buffers)\['(\w+)'\]$", r".\1", holder.call(key))
        return None

    def changes(self, before: Snapshot) -> list[Change]:
        """What is not as it was in a snapshot."""
        return [change for holder, content in before for change in _changes(holder, content)]


@contextlib.contextmanager
def preserved(model: nn.Module, *functions: Callable[..., Any]) -> Iterator[None]:
    """Afterwards, modules, their containers (hooks included) and what `functions` reach hold the same objects."""
    with PythonState(model, functions).preserved():
        yield


def _changes(holder: Holder, old: Content) -> Iterator[Change]:
    new = holder.read()
    module = isinstance(getattr(holder, "thing", None), nn.Module)
    if isinstance(holder, Members) and len(new) != len(old):
        yield Change(holder, None, "size", len(old), len(new))
    for key in [*old, *(key for key in new if key not in old)]:
        was, now = old.get(key, _MISSING), new.get(key, _MISSING)
        if was is now or (module and key in _INTERNAL):
            continue
        if isinstance(holder, Members) and len(new) != len(old) and (was is _MISSING or now is _MISSING):
            continue  # told by its size
        if _is_plain(was) and _is_plain(now):
            if not _equal(was, now):
                yield Change(holder, key, "value", was, now)
        else:
            yield Change(holder, key, "object", was, now)


def grows(change: Change) -> bool:
    """Whether a change is of a list or a deque that could have more members."""
    return change.kind == "size" and isinstance(change.holder, Members) and type(change.holder.container) in LISTS


def _same(a: Content, b: Content) -> bool:
    """Whether they hold the same objects in the same order."""
    return len(a) == len(b) and a.keys() == b.keys() and all(map(operator.is_, a.values(), b.values()))


def _is_plain(value: Any) -> bool:
    return value is None or value is _MISSING or type(value) in PLAIN


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _shown(value: Any) -> str:
    text = "nothing" if value is _MISSING else repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
