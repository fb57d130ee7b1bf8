"""Restores what a model's modules hold in Python: attributes, containers and hooks."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

CONTAINERS = (list, dict, OrderedDict, defaultdict, deque, set)
LARGE = 10_000  # a container with more elements is a vocabulary, not a cache

Attributes = list[tuple[nn.Module, dict[str, Any]]]
"""Every module with its former attributes."""


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[Attributes]:
    """Afterwards, modules and their containers (hooks included) hold the same objects as before.

    Yields the attributes that it kept. It does not keep the values of tensors.
    """
    modules: Attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    held: dict[int, tuple[Any, list[Any]]] = {}
    for _, attributes in modules:
        _find(attributes.values(), held)
    try:
        yield modules
    finally:
        for module, attributes in modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, content in held.values():
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def is_container(value: Any) -> bool:
    """Whether it is a plain mutable container that a step may fill."""
    return type(value) in CONTAINERS and len(value) <= LARGE


def _find(values: Iterable[Any], held: dict[int, tuple[Any, list[Any]]]) -> None:
    for value in values:
        if type(value) is tuple:
            _find(value, held)
        elif is_container(value) and id(value) not in held:
            held[id(value)] = (value, list(value.items()) if isinstance(value, dict) else list(value))
            _find(list(value.values()) if isinstance(value, dict) else list(value), held)
