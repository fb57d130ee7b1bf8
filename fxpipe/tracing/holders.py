"""What can hold Python state: attributes of an object, names of a module or a class, a closure's cell, a container.

Every holder is read as a dictionary and written from one, so that what watches state does not ask what holds it.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import pickle
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

CONTAINERS = (list, deque, dict, OrderedDict, defaultdict, Counter, set)
KINDS = (list, deque, dict, set)
LARGE = 10_000  # a container with more elements is a vocabulary, not a cache
MANY_BYTES = 1 << 20  # an array of more is data
PLAIN = (bool, int, float, complex, str, bytes)
_NOTHING = object()

Content = dict[Any, Any]


class Holder(Protocol):
    """A place that holds values by key; `name` is how the user writes it, `thing` the object itself."""

    name: str
    thing: Any

    def read(self) -> Content:
        """What it holds now, in a dictionary of its own."""

    def write(self, content: Mapping[Any, Any]) -> None:
        """Hold this and nothing else."""

    def call(self, key: Any) -> str:
        """How the user writes one of its values."""


def is_container(value: Any) -> bool:
    """Whether it is a plain mutable container that a step may fill."""
    return type(value) in CONTAINERS and len(value) <= LARGE


class Attributes:
    """An object's own attributes, in `__dict__` or in slots."""

    def __init__(self, thing: Any, name: str) -> None:
        self.thing, self.name = thing, name
        self._slots = list(_slots(type(thing)))
        self._dict: dict[str, Any] | None = getattr(thing, "__dict__", None)

    def read(self) -> Content:
        content = dict(self._dict or {})
        for slot in self._slots:
            value = getattr(self.thing, slot, _NOTHING)
            if value is not _NOTHING:
                content[slot] = value
        return content

    def write(self, content: Mapping[Any, Any]) -> None:
        for slot in self._slots:
            if slot in content:
                object.__setattr__(self.thing, slot, content[slot])
            elif hasattr(self.thing, slot):
                object.__delattr__(self.thing, slot)
        if self._dict is not None:
            self._dict.clear()
            self._dict.update({key: value for key, value in content.items() if key not in self._slots})

    def call(self, key: Any) -> str:
        return f"{self.name}.{key}" if self.name else str(key)


class Globals:
    """Some names of a module, which functions read or assign; if it is not the user's, only those of values."""

    thing: dict[str, Any]

    def __init__(self, module: dict[str, Any], prefix: str = "", of_user: bool = True) -> None:
        self.thing, self.names, self.name, self.of_user = module, set[str](), prefix, of_user

    def read(self) -> Content:
        return self.of(self.names)

    def of(self, names: Collection[str]) -> Content:
        """What it holds under these names."""
        content = {name: self.thing[name] for name in names if name in self.thing}
        if self.of_user:
            return content
        return {name: v for name, v in content.items() if not (callable(v) or isinstance(v, types.ModuleType))}

    def write(self, content: Mapping[Any, Any]) -> None:
        for name in self.read().keys() - content.keys():
            self.thing.pop(name, None)
        self.thing.update(content)

    def call(self, key: Any) -> str:
        return f"{self.name}{key}"


class ClassAttributes:
    """The attributes of a user's class, without its functions and what Python adds."""

    def __init__(self, thing: type, name: str) -> None:
        self.thing, self.name = thing, name

    def read(self) -> Content:
        return {k: v for k, v in vars(self.thing).items() if not (k.startswith("__") or hasattr(v, "__get__"))}

    def write(self, content: Mapping[Any, Any]) -> None:
        for key in self.read().keys() - content.keys():
            delattr(self.thing, key)
        for key, value in content.items():
            if vars(self.thing).get(key, _NOTHING) is not value:
                setattr(self.thing, key, value)

    def call(self, key: Any) -> str:
        return f"{self.name}.{key}"


class Members:
    """A list, deque, set or dictionary, or an object of a derived class, whose own methods are not used."""

    def __init__(self, container: Any, name: str) -> None:
        self.thing, self.name = container, name
        self.kind: Any = next(kind for kind in KINDS if isinstance(container, kind))
        if isinstance(container, OrderedDict):
            self.kind = OrderedDict  # which keeps its order outside of the dictionary

    def read(self) -> Content:
        if self.kind is set:
            return {member: member for member in set.__iter__(self.thing)}
        named = issubclass(self.kind, dict)
        return dict(self.kind.items(self.thing) if named else enumerate(self.kind.__iter__(self.thing)))

    def write(self, content: Mapping[Any, Any]) -> None:
        self.kind.clear(self.thing)
        if issubclass(self.kind, dict):
            for key, value in content.items():
                self.kind.__setitem__(self.thing, key, value)
        else:
            (set.update if self.kind is set else self.kind.extend)(self.thing, content.values())

    def call(self, key: Any) -> str:
        return f"{self.name}[{key!r}]"


class Single:
    """A holder of one value, which calls read and write."""

    def __init__(self, thing: Any, name: str) -> None:
        self.thing, self.name = thing, name

    def call(self, key: Any) -> str:
        return self.name


class Cell(Single):
    """A variable of an enclosing function, and the name of a function that reads it."""

    def __init__(self, thing: Any, name: str, reader: types.FunctionType) -> None:
        super().__init__(thing, name)
        self.reader = f"{reader.__module__}.{reader.__qualname__}"

    def read(self) -> Content:
        try:
            return {"": self.thing.cell_contents}
        except ValueError:  # nothing has been assigned to it yet
            return {}

    def write(self, content: Mapping[Any, Any]) -> None:
        if content:
            self.thing.cell_contents = content[""]
        elif self.read():
            del self.thing.cell_contents


class Array(Single):
    """The values of a small array of numpy's, as bytes."""

    def read(self) -> Content:
        return {"": self.thing.tobytes()}

    def write(self, content: Mapping[Any, Any]) -> None:
        if self.thing.flags.writeable:
            self.thing[...] = type(self.thing)(self.thing.shape, self.thing.dtype, content[""])


class Bytes(Single):
    """The bytes of a value of ctypes."""

    def read(self) -> Content:
        return {"": memoryview(self.thing).tobytes()}

    def write(self, content: Mapping[Any, Any]) -> None:
        (ctypes.c_char * len(content[""])).from_buffer(self.thing).raw = content[""]


class Generator(Single):
    """The state of a random generator of Python or numpy; `shared` if `random` or `numpy.random` draws from it."""

    def __init__(self, thing: Any, name: str, shared: bool = False) -> None:
        super().__init__(thing, name)
        self.shared = shared

    def read(self) -> Content:
        if isinstance(self.thing, random.Random):  # by its own methods: SystemRandom has no state and says so
            return {"": pickle.dumps(random.Random.getstate(self.thing))}
        old = hasattr(self.thing, "get_state")  # numpy's RandomState
        return {"": pickle.dumps(self.thing.get_state() if old else self.thing.bit_generator.state)}

    def write(self, content: Mapping[Any, Any]) -> None:
        state = pickle.loads(content[""])
        if isinstance(self.thing, random.Random):
            random.Random.setstate(self.thing, state)
        elif hasattr(self.thing, "set_state"):
            self.thing.set_state(state)
        else:
            self.thing.bit_generator.state = state


class Advancing(Single):
    """The position of an iterator of Python's, if it can be read. It cannot be put back."""

    def read(self) -> Content:
        frame = getattr(self.thing, "gi_frame", None)
        if frame is not None:
            variables = {name: v if isinstance(v, PLAIN) else id(v) for name, v in frame.f_locals.items()}
            return {"": f"{frame.f_lasti} {variables}".encode()}
        if isinstance(self.thing, itertools.count):
            return {"": repr(self.thing).encode()}
        left = operator.length_hint(self.thing, -1)
        return {"": object() if left < 0 else str(left).encode()}

    def write(self, content: Mapping[Any, Any]) -> None:
        """Do nothing."""


class Memory(Single):
    """The cache of a function under functools.lru_cache. If it has grown, all entries are dropped and computed again:
    the new one is a tensor of the trace."""

    def read(self) -> Content:
        return {"": str(self.thing.cache_info().misses).encode()}

    def write(self, content: Mapping[Any, Any]) -> None:
        if content != self.read():
            self.thing.cache_clear()


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots: Collection[str] = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{slot}" if slot.startswith("__") and slot[-2:] != "__" else slot
