"""State that a step and the hooks of a run both reach: a scheduler may lower an attribute that the step reads.

    NET.tau = 0.7 ** epoch  # in a scheduler: the captured step has a constant there
    MASK.bernoulli_(0.9)    # in train_data(): a tensor, whose new values can travel to the workers

Capture notes what the step reads of it, and where. A run looks at the same places (`StateOfHooks`).
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe import user_lines
from fxpipe.plan.user_files import WatchedSpec
from fxpipe.task.batch import unusual
from fxpipe.task.first_batches import values_kept
from fxpipe.torch_private import BUFFERS, MODULES, PARAMETERS
from fxpipe.tracing import holders
from fxpipe.tracing.holders import Holder
from fxpipe.tracing.model_state import OF_MODULES, PythonState, is_plain, put_back
from fxpipe.tracing.reach import Walk

Hooks = Mapping[str, Callable[..., Any]]

NO_HOOKS: Hooks = {}

OUTSIDE = "outside."
"""Begins the name of a buffer that is a tensor which no module holds."""

OF_STEPS = ("loss", "metrics")
"""The hooks that are the step and the evaluation themselves."""

WHOLE = "*"
"""In place of a key: all that a container holds."""

_LONG = 200  # characters of a value that a plan keeps
_CONTENTS = (PARAMETERS, BUFFERS, MODULES)
_MODULES_OWN = nn.Module.__getattr__.__code__.co_filename
_CONTAINERS = (holders.Members, holders.Array, holders.Bytes)
_UNWATCHED = (holders.Generator, holders.Advancing, holders.Memory)
_NOTHING = object()


def walk_of(hooks: Hooks) -> dict[str, Holder]:
    """What the hooks of a run reach, by names that are the same in every process."""
    named: dict[str, Holder] = {}
    for holder in Walk(None, [hooks[name] for name in sorted(hooks)], loaders=True).holders:
        if isinstance(holder, _UNWATCHED) or holder.name.startswith("os.environ"):  # each process has its own
            continue
        name = stem = _own_name(holder)
        for number in itertools.count(2):
            if named.setdefault(name, holder) is holder:
                break
            name = f"{stem}#{number}"
    return named


def _own_name(holder: Holder) -> str:
    if isinstance(holder, holders.Globals):
        return f"{holder.thing['__name__']}:"
    return f"{holder.reader}:{holder.name}" if isinstance(holder, holders.Cell) else holder.name


class BeforeModel:
    """What the hooks of a run reach between steps, before `model()` is called."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = {name: hook for name, hook in hooks.items() if name not in OF_STEPS}
        self._before = {id(holder.thing): (holder, holder.read()) for holder in walk_of(self._hooks).values()}

    def changed(self) -> bool:
        """Whether `model()` has changed some of it."""
        return any(not _same(before, holder.read()) for holder, before in self._before.values())


def _same(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> bool:
    """Whether a holder holds the same objects, or equal plain values and devices."""

    def equal(one: Any, other: Any) -> bool:
        plain = all(is_plain(value) or isinstance(value, torch.device) for value in (one, other))
        return one is other or (plain and repr(one) == repr(other))

    return before.keys() == now.keys() and all(equal(value, now[key]) for key, value in before.items())


def undone(hooks: Hooks) -> contextlib.AbstractContextManager[None]:
    """Inside, hooks may be tried; afterwards what they reach is as before."""
    return kept(walk_of(hooks).values() if hooks else ())


@contextlib.contextmanager
def kept(reached: Iterable[Holder]) -> Iterator[None]:
    """Afterwards, everything that these hold is as before, but for the values of large tensors."""
    before = [(holder, holder.read()) for holder in reached]
    held = {id(v): v for _, content in before for v in content.values() if isinstance(v, torch.Tensor)}
    with values_kept(tensor for tensor in held.values() if tensor.nbytes <= holders.MANY_BYTES):
        try:
            yield
        finally:
            put_back(before)


def described(value: Any, depth: int = 4) -> str:
    """A text by which a value is compared with that of another process: of a container, its members' texts.

    Tensors, and objects that are no plain values, count as equal to others of their type.
    """
    if is_plain(value) or isinstance(value, (torch.dtype, torch.device)):
        text = repr(value)
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        text = f"{value.dtype}{list(value.shape)} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    elif depth and isinstance(value, dict):
        text = f"{{{', '.join(f'{key!r}: {described(member, depth - 1)}' for key, member in value.items())}}}"
    elif depth and isinstance(value, (tuple, set, frozenset, *holders.KINDS)):
        members = [described(member, depth - 1) for member in value]
        text = f"[{', '.join(sorted(members) if isinstance(value, (set, frozenset)) else members)}]"
    else:
        return type(value).__name__
    return text if len(text) <= _LONG else f"{text[:40]}… ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def as_written(place: str) -> str:
    """A place as people write it: without the dictionaries of modules."""
    return re.sub(rf"\.(?:{'|'.join(_CONTENTS)})\['(\w+)'\]", r".\1", place)


def value_at(holder: Holder, key: Any) -> Any:
    """What a holder holds under a key; of an object, also what its class has; `None` where there is nothing."""
    if key == WHOLE:
        return holder.thing
    if isinstance(holder, holders.Attributes):
        return getattr(holder.thing, key, None)
    return holder.read().get(key)


class SharedState:
    """What the hooks of a run reach of a step's state, and what the step reads of it while it is traced.

    The hooks are what a run calls between steps, and the functions of the step, by name. `tensors` are, by id, those of
    the step whose memory hooks reach and that no gradient is asked of.
    """

    def __init__(self, python: PythonState, hooks: Hooks) -> None:
        self._python = python
        between = {name: hook for name, hook in hooks.items() if name not in OF_STEPS}
        reached = list(walk_of(between).values()) if between else []
        names = {id(holder.thing): name for name, holder in (walk_of(hooks) if reached else {}).items()}
        of_hooks = {id(holder.thing): holder for holder in reached if id(holder.thing) in names}
        both = [(mine, of_hooks[id(mine.thing)]) for mine in python.holders if id(mine.thing) in of_hooks]
        both = [pair for pair in both if getattr(pair[0], "of_user", True)]  # packages may fill their modules
        self._both = [(mine, names[id(mine.thing)], theirs) for mine, theirs in both]
        self._objects = {id(mine.thing): mine.thing for mine, _ in both if isinstance(mine, holders.Attributes)}
        self._reads: dict[int, dict[str, str | None]] = {key: {} for key in self._objects}  # lines by attribute
        shared = [(name, holder, _common(mine, holder)) for mine, name, holder in self._both]
        contents = {id(holder.thing): content for _, holder, content in shared}
        others = [
            (names[key], holder, {k: v for k, v in holder.read().items() if k not in contents.get(key, ())})
            for key, holder in of_hooks.items()
        ]
        self._places: dict[int, list[_TensorPlace]] = {}  # of tensors, by memory: first those that the step has, too
        for alias, rows in enumerate((shared, others)):
            for name, holder, content in rows:
                for key, value in content.items():
                    if memory := _memory(value):
                        place = _TensorPlace(name, key, as_written(holder.call(key)), value, bool(alias))
                        self._places.setdefault(memory, []).append(place)
        held = (value for mine in python.holders for value in mine.read().values() if isinstance(value, torch.Tensor))
        self.tensors = {id(tensor): tensor for tensor in held if _memory(tensor) in self._places}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, note which attributes of shared objects are read, and by which line."""
        before: dict[Any, Any] = {}
        try:
            classes: list[Any] = list({type(thing): None for thing in self._objects.values()})
            for cls in classes:
                original = vars(cls).get("__getattribute__")
                try:
                    cls.__getattribute__ = self._noting(cls.__getattribute__)
                    before[cls] = original
                except TypeError:  # a type of C
                    for key in (key for key, thing in self._objects.items() if type(thing) is cls):
                        self._reads[key].setdefault(WHOLE, None)
            yield
        finally:
            for cls, original in reversed(before.items()):
                if original is None:
                    del cls.__getattribute__
                else:
                    cls.__getattribute__ = original

    def _noting(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def noting(thing: Any, name: str) -> Any:
            reads = self._reads.get(id(thing))
            if reads is not None and name not in reads:
                frame = sys._getframe(1)
                attribute = WHOLE if name == "__dict__" else name
                if (not name.startswith("__") and name not in OF_MODULES) or attribute == WHOLE:
                    line = user_lines.stacked(user_lines.outwards(frame))
                    if line is not None and frame.f_code.co_filename != _MODULES_OWN:  # else torch or fxpipe reads it
                        reads[attribute] = line
            return original(thing, name)

        return noting

    def watched(self, buffers: Mapping[int, str], lines: Mapping[int, str | None]) -> tuple[WatchedSpec, ...]:
        """What the traced step has read of it; by id, the names of its buffers, and the lines that read tensors."""
        rows = [self._of_tensor(t, buffers.get(key), lines[key]) for key, t in self.tensors.items() if key in lines]
        read = self._containers()
        for mine, holder, theirs in self._both:
            if isinstance(mine, holders.Attributes):
                keys: dict[Any, str | None] = self._attributes(mine)
            elif isinstance(mine, _CONTAINERS):
                keys = {WHOLE: None} if id(mine.thing) in read and mine.read() else {}
            else:
                keys = dict.fromkeys(name for name, value in _common(mine, theirs).items() if not _is_code(mine, value))
            for key, line in keys.items():
                value = value_at(mine, key)
                if not is_followed(value):
                    place = as_written(theirs.name if key == WHOLE else theirs.call(key))
                    line = line or self._lines.get(re.findall(r"[^\W\d]\w*", place.partition("[")[0])[-1])
                    rows.append(WatchedSpec(holder, key if key == WHOLE else repr(key), place, described(value), line))
        return tuple(rows)

    def written(self, tensor: torch.Tensor) -> str:
        """How hooks write a tensor of `tensors`; the same for the step and for an evaluation."""
        return min(place.written for place in self._places[_memory(tensor)])

    def _of_tensor(self, tensor: torch.Tensor, buffer: str | None, line: str | None) -> WatchedSpec:
        """The row of a tensor that the step has read: of the place where hooks may put another, if there is one."""
        place = self._places[_memory(tensor)][0]
        travels = buffer is not None and _view(place.value) == _view(tensor)
        text = described(place.value) if place.alias else f"{tensor.dtype}{list(tensor.shape)}"
        return WatchedSpec(
            place.holder, repr(place.key), place.written, text, line, buffer if travels and buffer else "", place.alias
        )

    def _attributes(self, holder: holders.Attributes) -> dict[Any, str | None]:
        """Those of an object that are state and were read, with the lines."""
        reads = self._reads[id(holder.thing)]
        if WHOLE in reads:
            reads = {**dict.fromkeys(holder.read(), reads[WHOLE]), **reads}
        return {
            n: line for n, line in reads.items() if n != WHOLE and n not in OF_MODULES and _is_state(holder.thing, n)
        }

    def _containers(self) -> set[int]:
        """The ids of containers that the step has read, and of those within them."""
        seen: set[int] = set()
        queue: list[Any] = []
        for mine, _, theirs in self._both:
            if isinstance(mine, holders.Attributes):
                queue += [value_at(mine, name) for name in self._attributes(mine)]
                queue += [mine.thing.__dict__[name] for name in _CONTENTS if isinstance(mine.thing, nn.Module)]
            elif not isinstance(mine, _CONTAINERS):
                queue += _common(mine, theirs).values()
        while queue:
            value = queue.pop()
            if id(value) not in seen and not isinstance(value, (nn.Module, torch.Tensor)):
                seen.add(id(value))
                if isinstance(value, (tuple, *holders.KINDS)):
                    queue += value.values() if isinstance(value, dict) else value
        return seen

    @functools.cached_property
    def _lines(self) -> dict[str, str | None]:
        """By a name that the step's functions mention, the first line that does."""
        lines: dict[str, str | None] = {}
        codes = [f.__code__ for f in self._python.reached if isinstance(f, FunctionType)]
        while codes:
            code = codes.pop()
            if user_lines.is_own(code.co_filename):
                for instruction in dis.get_instructions(code):
                    name, line = instruction.argval, instruction.positions and instruction.positions.lineno
                    if isinstance(name, str) and line and name not in lines:
                        lines[name] = user_lines.place(code.co_filename, line)
                codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        return lines


class _TensorPlace(NamedTuple):
    """Where hooks find a tensor, or an array of its memory; an `alias` is in no place where the step looks."""

    holder: str
    key: Any
    written: str
    value: Any
    alias: bool


def is_followed(value: Any) -> bool:
    """Whether it is a tensor that may get new values: no parameter."""
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def as_tensor(value: Any) -> torch.Tensor | None:
    """The tensor itself, or one that shares the memory of an array; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "base"):
        with contextlib.suppress(TypeError, ValueError):
            return torch.from_numpy(value)
    return None


def _memory(value: Any) -> int:
    """Where the memory of a tensor or an array begins; 0 for anything else, and for tensors that are trained."""
    tensor = as_tensor(value)
    if tensor is None or isinstance(value, nn.Parameter) or tensor.requires_grad or unusual(tensor):
        return 0
    while isinstance(base := getattr(value, "base", None), type(value)) and not isinstance(value, torch.Tensor):
        value = base
    owner = as_tensor(value)
    return 0 if owner is None or owner.is_meta else owner.untyped_storage().data_ptr()


def _view(value: Any) -> tuple[Any, ...]:
    tensor = as_tensor(value)
    assert tensor is not None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _common(mine: Holder, theirs: Holder) -> dict[Any, Any]:
    """What both hold: of a module's names, those that both mention."""
    held = mine.read()
    if isinstance(mine, holders.Globals) and isinstance(theirs, holders.Globals):
        return {name: value for name, value in held.items() if name in theirs.names}
    return held


def _is_state(thing: Any, name: str) -> bool:
    """Whether an attribute is a value of the object or its class: no method, and no property, which reads others."""
    if name in getattr(thing, "__dict__", ()):
        return True
    kind = next((vars(base)[name] for base in type(thing).__mro__ if name in vars(base)), _NOTHING)
    if isinstance(thing, nn.Module) and kind is _NOTHING:
        return not any(name in vars(thing)[part] for part in _CONTENTS)  # which are watched as a whole
    return not hasattr(kind, "__get__") or type(kind).__name__ == "member_descriptor"


def _is_code(holder: Holder, value: Any) -> bool:
    """Whether it is no state: a class, a module, or what a decorator wraps."""
    return isinstance(value, (type, ModuleType)) or (isinstance(holder, holders.Cell) and callable(value))
