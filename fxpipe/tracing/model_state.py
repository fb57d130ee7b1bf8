"""Keeps what a step reaches in Python (attributes, globals, closures, containers), and finds what the step changed."""

from __future__ import annotations

import contextlib
import enum
import numbers
import operator
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from fxpipe.tracing.holders import Attributes, Content, Generator, Holder, Members
from fxpipe.tracing.reach import Walk, has_state

OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}  # of a module; its hooks are among them
_SIZED = (list, tuple, dict, set, deque)
_MISSING = object()
WHOLE = object()

Snapshot = list[tuple[Holder, Content]]


class Change(NamedTuple):
    """A change that the step has made to a value that it can reach.

    Attributes:
        key: the value's key in its holder; `WHOLE` if it is the holder itself, a container of another size.
        kind: 'value' of a number, a text or the like; 'size' of a container; 'object' for anything else.
    """

    holder: Holder
    key: Any
    kind: Literal["value", "size", "object"]
    old: Any
    new: Any

    @property
    def place(self) -> str:
        """How the user writes it; for a member of a container, the container."""
        return self.holder.name if isinstance(self.holder, Members) else self.holder.call(self.key)

    def __str__(self) -> str:
        name = self.holder.name if self.key is WHOLE else self.holder.call(self.key)
        if self.kind == "size":
            return f"{name} ({self.old} → {self.new} elements)"
        if self.kind == "object" or any(isinstance(value, bytes) for value in (self.old, self.new)):
            return name
        return f"{name} ({_shown(self.old)} → {_shown(self.new)})"


class PythonState:
    """All that a step can reach in Python: what holds it, and all objects that were met on the way.

    The model's own code is always looked into, and the `functions` of the step; `passed` objects are skipped.
    """

    def __init__(
        self, model: nn.Module, functions: Sequence[Callable[..., Any]] = (), passed: Sequence[Any] = ()
    ) -> None:
        self._walk = Walk(model, functions, passed)
        self.holders = self._walk.holders
        self.reached = self._walk.seen.values()

    def look_again(self) -> Snapshot:
        """Add what the step has made since, and return a snapshot."""
        count = len(self.holders)
        self._walk.go_on()
        return [(holder, holder.read()) for holder in self.holders[count:]]

    def snapshot(self) -> Snapshot:
        return [(holder, holder.read()) for holder in self.holders]

    @contextlib.contextmanager
    def preserved(self, draws: bool = True) -> Iterator[None]:
        """Afterwards everything holds the same objects as before; the values of tensors are not kept.

        With `draws`, generators of random numbers are put back, too.
        """
        before = [(h, content) for h, content in self.snapshot() if draws or not isinstance(h, Generator)]
        try:
            yield
        finally:
            put_back(before)

    def name_of(self, value: Any) -> str | None:
        """The user's expression for a value that a known holder has; None if there is none."""
        for holder in self.holders:
            for key, held in holder.read().items():
                if held is value:
                    return re.sub(r"\._(?:parameters|buffers)\['(\w+)'\]$", r".\1", holder.call(key))
        return None

    def changes(self, before: Snapshot) -> list[Change]:
        """What differs from a snapshot."""
        return [change for holder, content in before for change in _changes(holder, content)]


def put_back(before: Snapshot) -> None:
    """Restore what everything held at a snapshot."""
    for holder, content in before:
        if not _same(holder.read(), content):
            holder.write(content)


@contextlib.contextmanager
def preserved(model: nn.Module, *functions: Callable[..., Any]) -> Iterator[None]:
    """Afterwards, modules, their containers (hooks included) and what `functions` reach hold the same objects."""
    with PythonState(model, functions).preserved():
        yield


def _changes(holder: Holder, old: Content) -> Iterator[Change]:
    new = holder.read()
    module = isinstance(getattr(holder, "thing", None), nn.Module)
    resized = isinstance(holder, Members) and len(new) != len(old)
    if resized:
        yield Change(holder, WHOLE, "size", len(old), len(new))
    elif isinstance(holder, Members) and new.keys() == old.keys() and [*map(hash, new)] != [*map(hash, old)]:
        yield Change(holder, WHOLE, "object", old, new)  # in another order
    for key in [*old, *(key for key in new if key not in old)]:
        was, now = old.get(key, _MISSING), new.get(key, _MISSING)
        if was is now or (module and key in OF_MODULES) or (resized and (was is _MISSING or now is _MISSING)):
            continue
        yield from _change(holder, key, was, now)


def _change(holder: Holder, key: Any, was: Any, now: Any) -> Iterator[Change]:
    """How one value has changed; if another object of its class replaces it, how that one differs."""
    if is_plain(was) and is_plain(now):
        if not _equal(was, now):
            yield Change(holder, key, "value", was, now)
    elif isinstance(was, _SIZED) and isinstance(now, _SIZED) and len(was) != len(now):
        yield Change(holder, key, "size", len(was), len(now))
    else:
        yield Change(holder, key, "object", was, now)
        if type(was) is type(now) and has_state(now) and not isinstance(now, nn.Module):
            inner = Attributes(now, holder.call(key))
            for name, value in Attributes(was, "").read().items():
                current = getattr(now, name, _MISSING)
                if is_plain(value) and is_plain(current) and not _equal(value, current):
                    yield Change(inner, name, "value", value, current)


def _same(a: Content, b: Content) -> bool:
    """Whether they hold the same objects in the same order."""
    return len(a) == len(b) and a.keys() == b.keys() and all(map(operator.is_, a.values(), b.values()))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a tuple of those: equal ones are the same."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or value is _MISSING or isinstance(value, (numbers.Number, str, bytes, enum.Enum))


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _shown(value: Any) -> str:
    text = "nothing" if value is _MISSING else repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
