"""Python state that an optimizer or a scheduler changes and does not own: globals, closures, other objects.

Optimizers of several workers of a process share it, and no checkpoint contains it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fxpipe.task.several_optimizers import parts_of
from fxpipe.tracing.model_state import PythonState
from fxpipe.user_lines import is_own

_OWN = (torch.optim.Optimizer, LRScheduler)


def state_outside(things: Iterable[Any], others: Iterable[Any] = (), libraries: bool = True) -> PythonState:
    """The state that the code of these optimizers and schedulers reaches: their classes, hooks and functions.

    Args:
        things: their own attributes are left out.
        others: functions that change state, too.
        libraries: the code of installed packages counts, too, whose state outside is caches and loaded kernels.
    """
    every = [part for thing in things for part in _parts(thing)]
    passed = [value for part in every for value in (part, *vars(part).values())]
    classes = [type(part) for part in every if libraries or not of_library(type(part))]
    roots = [root for part in every for root in _functions(vars(part).values())]
    return PythonState(nn.Module(), [*classes, *roots, *others], [item for item in passed if not callable(item)])


def of_library(kind: type) -> bool:
    """Whether a class is of Python, or of an installed package."""
    return not is_own(getattr(sys.modules.get(kind.__module__), "__file__", None))


def _parts(thing: Any) -> Iterator[Any]:
    """The optimizers in a list; a scheduler and those that it calls."""
    if isinstance(thing, torch.optim.Optimizer):
        yield from parts_of(thing)
    elif hasattr(thing, "__dict__"):
        yield thing
        for value in vars(thing).values():
            for member in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(member, LRScheduler) and member is not thing:
                    yield from _parts(member)


def _functions(values: Iterable[Any]) -> Iterator[Any]:
    """Functions among the values and in their lists and dictionaries; for another callable object, its class."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _functions(value)
        elif isinstance(value, dict):
            yield from _functions(value.values())
        elif callable(value):
            yield value if hasattr(value, "__code__") or hasattr(value, "__func__") else type(value)
