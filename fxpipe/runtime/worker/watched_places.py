"""What the hooks of this process reach: places that a plan watches, and parameters, to which they may not write."""

from __future__ import annotations

import ast
import copy
import ctypes
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import TaskError
from fxpipe.plan.plan import Plan
from fxpipe.plan.user_files import WatchedSpec
from fxpipe.torch_private import DisableTorchFunction, version_of
from fxpipe.tracing.holders import Attributes, ClassAttributes, Globals, Holder
from fxpipe.tracing.hook_state import WHOLE, Hooks, as_tensor, as_written, described, is_followed, value_at, walk_of

_COMPARED = 1 << 14
"""Bytes of a tensor that are compared at every step; of a longer one, some values."""

_CURE = (
    "put it into the batch, which train_data() gives with each step; or let the step read a tensor (register_buffer) "
    "that the hook changes in place: new values of tensors travel to the workers"
)

_WRITES = re.compile(r"[a-z0-9_]*[a-z0-9]_|__i[a-z]+__|__setitem__|__set__")
_OF_TENSORS: Any = Tensor  # its stubs have no setters and getters
_FREEZES = {Tensor.requires_grad_, _OF_TENSORS.requires_grad.__set__}
"""What `WhatTrains` refuses."""

_NO_WRITES = {*_FREEZES, _OF_TENSORS.grad.__set__, Tensor.__index__, Tensor.__invert__}
_SAME_VALUES = {_OF_TENSORS.data.__get__, Tensor.detach, Tensor.view, Tensor.__getitem__}


class WatchedPlaces:
    """Where the hooks of this process reach what the plan watches.

    Attributes:
        watching: the holders.
        missing: what hooks do not reach here, or not yet.
        tensors: those whose new values workers get, by buffer.
        fixed: those whose new values no worker can get.
        parameters: those that hooks reach and that may be the model's, by how hooks write them. Where a run has called
            `model()`, its own have no values.
    """

    def __init__(self, plan: Plan, hooks: Hooks) -> None:
        reached = walk_of(hooks)
        plain: dict[str, list[WatchedSpec]] = {}
        for row in plan.watched:
            if row.buffer is None:
                plain.setdefault(row.holder, []).append(row)
        self.watching = [Watched(reached[name], rows) for name, rows in plain.items() if name in reached]
        self.missing = [row.place for row in plan.watched if not _is_there(row, reached)]
        rows = sorted((row for row in plan.watched if row.buffer is not None), key=lambda row: not row.alias)
        # Aliases come first: where there are two, the place that the step looks at counts.
        followed = [FollowedTensor(row, reached[row.holder]) for row in rows if _is_there(row, reached)]
        self.tensors = {tensor.row.buffer or "": tensor for tensor in followed if tensor.row.buffer in plan.followed}
        self.fixed = [tensor for tensor in followed if tensor.row.buffer not in plan.followed]
        named = {as_written(name): p for each in reached.values() for name, p in _parameters(each)}
        self.parameters = {name: p for name, p in named.items() if p.is_meta} or (named if plan.watched else {})

    def look(self, minibatch: int) -> bool:
        """Compare all with what capture found; as `Watched.look`."""
        for tensor in self.fixed:
            if tensor.changed():
                raise _changed(tensor.row, "", "", minibatch)
        return any([watched.look(minibatch) for watched in self.watching])

    @property
    def as_captured(self) -> bool:
        """Whether nothing is missing, and all values are those that capture found."""
        return not self.missing and all(watched.as_captured for watched in self.watching)


def _is_there(row: WatchedSpec, reached: Mapping[str, Holder]) -> bool:
    holder = reached.get(row.holder)
    return holder is not None and (row.buffer is None or as_tensor(value_at(holder, _key(row, holder))) is not None)


class FollowedTensor:
    """A tensor in a place where hooks may change it, or put another of its shape and type."""

    def __init__(self, row: WatchedSpec, holder: Holder) -> None:
        self.row, self.holder, key = row, holder, _key(row, holder)
        names = _names(holder) or {}
        self._value = partial(names.get, key) if key in names else partial(value_at, holder, key)
        self._tensor = self._there()
        self.remember()

    def _there(self) -> Tensor:
        value = self._value()
        tensor = as_tensor(value)
        if tensor is None:
            raise _changed(self.row, self.row.value, described(value))
        return tensor

    def _now(self) -> Tensor:
        same = self.row.alias or self._value() is self._tensor
        return self._tensor if same else self._there()

    def state(self) -> Any:
        """Equal to itself, by `==`, as long as the same tensor has the same values."""
        before, now = self._tensor, self._now()
        if now is not before:
            if (now.shape, now.dtype) != (before.shape, before.dtype):
                raise _changed(self.row, _typed(before), _typed(now))
            self._tensor = now
        return id(now), version_of(now), _some_bytes(now)

    def changed(self) -> bool:
        """Whether it has other values than when they were remembered; raises as `state`."""
        return bool(self.state() != self.remembered[0])

    def remember(self) -> None:
        """From now on, these values are no change."""
        self.remembered = self.state(), self._tensor  # which is kept, so that no other gets its id

    def value(self) -> Tensor:
        """A copy on the CPU."""
        return self._now().detach().to("cpu", copy=True)

    def set(self, value: Tensor) -> None:
        """Give it these values in place."""
        with torch.no_grad():
            self._now().copy_(value)


class Watched:
    """What capture found in one holder, but for tensors."""

    def __init__(self, holder: Holder, rows: Sequence[WatchedSpec]) -> None:
        self._holder = holder
        self._rows = [(_key(row, holder), row) for row in rows]
        self._current = _getter(holder, [key for key, _ in self._rows])
        self._saved: Any = None
        self._objects: dict[tuple[Any, Any], Any] | None = None  # at the last check, by row and key

    @property
    def as_captured(self) -> bool:
        """Whether all values are those that capture found."""
        return all(described(value_at(self._holder, key)) == row.value for key, row in self._rows)

    def look(self, minibatch: int) -> bool:
        """Compare with what capture found, in less than a microsecond where nothing has changed.

        Returns:
            Whether an object was replaced by another one, so that what it holds must be found again.
        """
        try:
            if self._objects is not None and self._current() == self._saved:
                return False
        except Exception:  # a tensor was replaced, and compared; or a name is gone
            pass
        replaced, objects = False, {}
        for key, row in self._rows:
            text = described(value_at(self._holder, key))
            if text != row.value:
                raise _changed(row, row.value, text, minibatch)
            content = self._holder.read() if key == WHOLE else {key: value_at(self._holder, key)}
            for each, value in content.items():
                objects[key, each] = value
                before = value if self._objects is None else self._objects.get((key, each), value)
                if before is not value and not is_followed(value):
                    if callable(value) or isinstance(value, Tensor):
                        raise _changed(row, f"one {type(value).__name__}", "another", minibatch)
                    replaced = True
        self._objects = objects
        self._saved = copy.copy(self._current())
        return replaced


def _parameters(holder: Holder) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(holder.thing, nn.Module):
        yield from ((f"{holder.name}.{name}", p) for name, p in holder.thing.named_parameters(recurse=False))
        return
    for key, value in holder.read().items():
        if isinstance(value, nn.Parameter) and value.is_meta:
            yield holder.call(key), value


def _key(row: WatchedSpec, holder: Holder) -> Any:
    """The key that a row means."""
    if row.key == WHOLE:
        return WHOLE
    keys = [key for key in holder.read() if repr(key) == row.key]
    return keys[0] if keys else ast.literal_eval(row.key)  # of an object, what its class has


def _getter(holder: Holder, keys: Sequence[Any]) -> Callable[[], Any]:
    """Returns something that is equal, by `==`, as long as the same is there; fast."""
    thing: Any = holder.thing
    if keys == [WHOLE] and type(thing) in (list, dict, set):
        return lambda: thing
    names = _names(holder)
    if names is not None and all(key in names for key in keys):
        return partial(operator.itemgetter(*keys), names)
    return lambda: [holder.read() if key == WHOLE else value_at(holder, key) for key in keys]


def _names(holder: Holder) -> Any:
    """The dictionary of an object's, a class's or a module's names; None where there is none."""
    if isinstance(holder, Globals):
        return holder.thing
    return getattr(holder.thing, "__dict__", None) if isinstance(holder, (Attributes, ClassAttributes)) else None


def _some_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, or of some of its values."""
    flat = tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.detach().cpu().contiguous()
    if flat.nbytes > _COMPARED:
        flat = flat.view(-1)[:: -(-flat.nbytes // _COMPARED)].contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def _typed(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _changed(row: WatchedSpec, before: str, now: str, minibatch: int = 0) -> TaskError:
    values = f" ({before} → {now})" if before else ""
    return TaskError(
        f"a hook changes {row.place}{values}, which the step reads: the stages have what it was when they were "
        f"compiled, so the run ends before step {minibatch + 1}",
        where=row.where,
        hint=_CURE,
        page="python-state",
    )


class _Guarded(Tensor):
    place: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        operands = args or tuple((kwargs or {}).values())
        first = operands[0] if operands and isinstance(operands[0], (list, tuple)) else operands[:1]
        changed = next((each for each in first if isinstance(each, _Guarded)), None)
        if changed is not None and _WRITES.fullmatch(name) and func not in _NO_WRITES:
            raise TaskError(
                f"a hook changes the parameter {changed.place} ({name}), which the workers of a run do not see",
                hint="let the optimizer do it: in its step(), or in optimizer(named_parameters) with "
                "register_step_post_hook, which gets the parameters that a worker trains",
            )
        with DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        if changed is not None and func in _SAME_VALUES:
            result = result.as_subclass(_Guarded)
            result.place = changed.place
        return result


class GuardedParameters:
    """From now on until `release`, writing to these parameters raises TaskError: workers train others, so the change
    would be lost without a word."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        places = {parameter: place for place, parameter in parameters.items()}
        self._before = [(p, type(p)) for p in places]
        for parameter, kind in self._before:
            parameter.__class__ = type(kind.__name__, (_Guarded, kind), {"place": places[parameter]})

    def release(self) -> None:
        for parameter, kind in self._before:
            parameter.__class__ = kind
        self._before = []
