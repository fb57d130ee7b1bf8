"""Which Python objects a step can reach: from its code and the model's modules, as far as they are the user's own.

A function reaches what its code names: globals, variables of enclosing functions, default arguments, its own
attributes, what it sets on modules. An object reaches its attributes and the code of its class, a cache what it has
kept. Code of torch, of Python and of installed packages is not looked into; their objects are. The walk is breadth
first and ends after `MOST` holders.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import enum
import functools
import gc
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxpipe import user_lines
from fxpipe.tracing import holders
from fxpipe.tracing.holders import Holder

MOST = 10_000
"""Most holders outside the model's modules: enough for what people write, and milliseconds to look through."""

_ATOMS = (*holders.PLAIN, type(None), torch.Tensor, torch.dtype, torch.device, torch.Size, torch.Generator, enum.Enum)
_WRAPPERS: dict[type, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args"),
    functools._lru_cache_wrapper: ("__wrapped__",),
}
_NUMPY_GENERATORS = {("numpy.random._generator", "Generator"), ("numpy.random.mtrand", "RandomState")}
_C_VALUE: Any = ctypes.c_int.__mro__[-2]
"""What all types of ctypes derive from."""
_METHODS = (types.MethodType, types.MethodWrapperType, types.BuiltinMethodType)
_SPACES = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
    queue.Queue,
    threading.local,
    type(os.environ),
)

_LOADERS = ("torch.utils.data", "torch.optim")


class Walk:
    """Walks from functions, and a model, to all holders of state that they can read or write.

    The `roots` are the functions of a step, or of a run's hooks, which have no model. Hooks reach data through torch's
    `loaders`, optimizers and schedulers. Of the holders that are found, the model's modules and their containers come
    first.
    """

    def __init__(
        self, model: nn.Module | None, roots: Iterable[Any], passed: Iterable[Any] = (), loaders: bool = False
    ) -> None:
        self._loaders = loaders
        self.holders: list[Holder] = []
        self.seen = {id(thing): thing for thing in passed}  # the objects, kept alive so that ids stay unique
        self.queue: deque[tuple[Any, str]] = deque()
        self.names: dict[int, holders.Globals] = {}  # by module
        self.draws(random.random, "random")
        if "numpy" in sys.modules:
            self.draws(sys.modules["numpy"].random.rand, "numpy.random")
        paths = {} if model is None else dict(model.named_modules())
        for path, module in paths.items():
            self.seen[id(module)] = module
            self.holders.append(holders.Attributes(module, path))
        for path, module in paths.items():
            for key, value in module.__dict__.items():
                self.meet(value, f"{path}.{key}" if path else key)
            self.meet(type(module), type(module).__name__)
        self.run(sys.maxsize, only=(tuple, *holders.CONTAINERS))
        for root in roots:
            self.seen.setdefault(id(root), root)
            self.queue.appendleft((root, getattr(root, "__name__", type(root).__name__)))
        self.run(MOST)

    def meet(self, value: Any, name: str) -> None:
        if not isinstance(value, _ATOMS) and id(value) not in self.seen:
            self.seen[id(value)] = value
            self.queue.append((value, name))

    def draws(self, function: Any, name: str) -> None:
        """Take the process's generator that a function draws from."""
        self.seen[id(function.__self__)] = function.__self__
        self.holders.append(holders.Generator(function.__self__, name, shared=True))

    def run(self, most: int, only: tuple[type, ...] = (object,)) -> None:
        """Look at what was met, until nothing is left or `most` holders are found; leave objects of other types for
        later."""
        end, later = len(self.holders) + most, []
        while self.queue and len(self.holders) < end:
            value, name = self.queue.popleft()
            if isinstance(value, only):
                self.look(value, name)
            else:
                later.append((value, name))
        self.queue.extend(later)

    def go_on(self) -> None:
        """Look at what the holders have come to hold since."""
        for holder in list(self.holders):
            self.meet_all(holder)
        self.run(MOST)

    def meet_all(self, holder: Holder) -> None:
        """Meet what a holder holds."""
        if isinstance(holder, holders.Memory):
            for value in gc.get_referents(holder.thing):  # what it has returned, or a dictionary of that
                self.meet(value, f"{holder.name}()")
        elif isinstance(holder, holders.Advancing):
            for variable, value in getattr(getattr(holder.thing, "gi_frame", None), "f_locals", {}).items():
                self.meet(value, variable)
        else:
            for key, value in holder.read().items():
                self.meet(value, holder.call(key))

    def look(self, value: Any, name: str) -> None:
        """Take an object as a holder if it is one, and meet what it leads to."""
        kind = type(value)
        if kind in (tuple, frozenset):
            for i, member in enumerate(value):
                self.meet(member, f"{name}[{i}]")
        elif isinstance(value, holders.KINDS):
            if len(value) <= holders.LARGE:
                self.hold(holders.Members(value, name))
            if kind not in holders.CONTAINERS and has_state(value):
                self.hold(holders.Attributes(value, name))
        elif isinstance(value, types.FunctionType):
            self.function(value, name)
        elif isinstance(value, _METHODS):
            self.meet(getattr(value, "__func__", None), name)
            self.meet(value.__self__, name.rpartition(".")[0] or type(value.__self__).__name__)
        elif kind in _WRAPPERS:
            for part in _WRAPPERS[kind]:
                self.meet(getattr(value, part), name)
            for keyword, argument in getattr(value, "keywords", {}).items():
                self.meet(argument, keyword)
            if kind is functools._lru_cache_wrapper:
                self.hold(holders.Memory(value, name))
        elif isinstance(value, type):
            self.cls(value)
        elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            if value.nbytes <= holders.MANY_BYTES and not value.dtype.hasobject:
                self.holders.append(holders.Array(value, name))
        elif isinstance(value, _C_VALUE):
            if memoryview(value).nbytes <= holders.MANY_BYTES:
                self.holders.append(holders.Bytes(value, name))
        elif isinstance(value, random.Random) or (kind.__module__, kind.__name__) in _NUMPY_GENERATORS:
            self.holders.append(holders.Generator(value, name))
        elif kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
            self.hold(holders.Advancing(value, name))
        elif isinstance(value, weakref.ref):
            self.meet(value(), name)
        elif has_state(value) or (self._loaders and kind.__module__.startswith(_LOADERS)):
            self.hold(holders.Attributes(value, name))
            self.meet(kind, kind.__name__)

    def hold(self, holder: Holder) -> None:
        self.holders.append(holder)
        self.meet_all(holder)

    def function(self, function: types.FunctionType, name: str) -> None:
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self.seen:
                self.seen[id(cell)] = cell
                self.hold(holders.Cell(cell, variable, function))
        if not user_lines.is_own(function.__code__.co_filename):
            return
        code, defaults = function.__code__, function.__defaults__ or ()
        for variable, value in zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False):
            self.meet(value, variable)
        for variable, value in (function.__kwdefaults__ or {}).items():
            self.meet(value, variable)
        self.hold(holders.Attributes(function, name))
        self.use(function.__globals__, set(_mentioned(code)))

    def use(self, module: dict[str, Any], names: set[str]) -> None:
        """Note that a function mentions these names, of its own module or of a module that one of them is."""
        spaces: list[tuple[dict[str, Any], str, bool]] = [(module, "", True)]
        met = {id(module)}
        for space, prefix, of_user in spaces:
            if id(space) not in self.names:
                self.names[id(space)] = holders.Globals(space, prefix, of_user)
                self.holders.append(self.names[id(space)])
            holder = self.names[id(space)]
            new = names - holder.names
            holder.names |= new
            for name, value in sorted(holder.of(new).items()):
                self.meet(value, holder.call(name))
            for name in sorted(names & space.keys()):
                inner = space[name]
                if isinstance(inner, types.ModuleType) and id(inner.__dict__) not in met:
                    met.add(id(inner.__dict__))
                    file = getattr(inner, "__file__", None)
                    # torch.ops says that its file is 'torch.ops'
                    of_user = user_lines.is_own(file) and os.path.isabs(str(file))
                    spaces.append((inner.__dict__, f"{prefix}{name}.", of_user))

    def cls(self, cls: type) -> None:
        for base in cls.__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if not user_lines.is_own(file) or issubclass(base, enum.Enum):
                continue
            if base is not cls:
                self.meet(base, base.__name__)
                continue
            self.hold(holders.ClassAttributes(cls, cls.__name__))
            for name, value in vars(cls).items():
                if hasattr(value, "__get__"):
                    self.meet(value, f"{cls.__name__}.{name}")


def has_state(value: Any) -> bool:
    """Whether an object's attributes are worth watching: one of the user's, of a package's, or a module of torch's."""
    if isinstance(value, (nn.Module, *_SPACES)):
        return True
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package in ("torch", "fxpipe") or (package in sys.stdlib_module_names and package != "__main__"):
        return False
    return hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__)


def _mentioned(code: types.CodeType) -> Iterator[str]:
    """The names in a function's code, those in quotes too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _mentioned(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
