"""Containers of batches that torch's pytrees do not know: mappings, such as a tokenizer's BatchEncoding, and
dataclasses.

Their types are registered when a batch first has one, so a batch reaches the model in its original container.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import namedtuple
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import BatchError
from fxpipe.torch_private import pytree, register_namedtuple

_COMPLETE: set[Any] = set()
"""The user's types whose registration has everything."""


def flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a batch with any containers, and its structure; a list of strings is one leaf."""
    while True:
        leaves, spec = pytree.tree_flatten(batch, is_leaf=is_text)
        unknown = {type(leaf): leaf for leaf in leaves if _is_container(leaf)}
        if not unknown:
            _complete(spec)
            return leaves, spec
        for kind, value in unknown.items():
            _register(kind, value)


def is_text(value: Any) -> bool:
    """Whether it is a list of strings, possibly nested or empty: names of files, words."""
    return type(value) in (list, tuple) and all(type(v) is str or is_text(v) for v in value)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _complete(spec: pytree.TreeSpec) -> None:
    """Give the user's own nodes of pytrees what their registration may lack: names of children, and a text.

    The text is the same in every process; torch's needs a name, and a context that JSON knows. A namedtuple needs only
    the name.
    """
    stack = [spec]
    while stack:
        part = stack.pop()
        stack += part.children()
        kind: Any = part.context if part.type is namedtuple else part.type
        if kind is None or kind in _COMPLETE or kind.__module__ in ("builtins", "collections"):
            continue
        _COMPLETE.add(kind)
        if part.type is namedtuple:
            if _nameless(pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)):
                register_namedtuple(kind, serialized_type_name=qualified(kind))
            continue
        node, text = pytree.SUPPORTED_NODES[kind], pytree.SUPPORTED_SERIALIZED_TYPES[kind]
        if node.flatten_with_keys_fn is None:
            by_name = functools.partial(_children_by_name, node.flatten_fn)
            pytree.SUPPORTED_NODES[kind] = type(node)(kind, node.flatten_fn, node.unflatten_fn, by_name)
        if text.to_dumpable_context is None:
            name = qualified(kind) if _nameless(text) else text.serialized_type_name
            pytree.SUPPORTED_SERIALIZED_TYPES[kind] = type(text)(kind, name, _context_text, json.loads)
            pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = kind


def _nameless(text: Any) -> bool:
    return text is None or text.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND


def qualified(kind: type) -> str:
    """A class's name with its module's."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _children_by_name(flat: Any, value: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The children under the names of the attributes that hold them, else under their numbers."""
    children, context = flat(value)
    names = {id(held): name for name, held in getattr(value, "__dict__", {}).items()}
    entries: list[Any] = [
        pytree.GetAttrKey(names[id(child)]) if id(child) in names else pytree.SequenceKey(i)
        for i, child in enumerate(children)
    ]
    if len(set(entries)) < len(entries):  # two attributes hold one object
        entries = list(map(pytree.SequenceKey, range(len(entries))))
    return list(zip(entries, children, strict=True)), context


def _context_text(context: Any) -> str:
    def described(value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        content = (
            "" if kind is value else getattr(value, "__dict__", None) or re.sub(" at 0x[0-9a-f]+", "", repr(value))
        )
        return [qualified(kind), content]

    try:
        return json.dumps(context, default=described)
    except (TypeError, ValueError):  # keys that are no strings, or a circle
        return json.dumps(described(repr(context)))


def _register(kind: type, value: Any) -> None:
    names = None if isinstance(value, Mapping) else [field.name for field in dataclasses.fields(value) if field.init]

    def parts(value: Any) -> tuple[list[Any], list[Any]]:
        if names is None:
            return list(value.values()), list(value.keys())
        return [getattr(value, name) for name in names], names

    def parts_by_name(value: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
        values, keys = parts(value)
        entry = pytree.MappingKey if names is None else pytree.GetAttrKey
        return [(entry(key), part) for key, part in zip(keys, values, strict=True)], keys

    def made(values: Iterable[Any], keys: list[Any]) -> Any:
        held = dict(zip(keys, values, strict=True))
        return kind(held) if names is None else kind(**held)

    values, keys = parts(value)
    try:
        again = made(values, keys)
        held, keys_again = parts(again)
        same = keys_again == keys and all(a is b for a, b in zip(held, values, strict=True))
        if names is not None:
            more = [field.name for field in dataclasses.fields(value) if not field.init]
            same = same and all(_alike(getattr(again, name), getattr(value, name)) for name in more)
    except Exception:
        same = False
    if not same:
        raise BatchError(
            f"the batch holds a {qualified(kind)}, which cannot be rebuilt from its content",
            hint="let train_data() give a dict, list or tuple of tensors",
        )
    pytree.register_pytree_node(
        kind, parts, made, serialized_type_name=qualified(kind), flatten_with_keys_fn=parts_by_name
    )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def tree_text(spec: str) -> str:
    """A serialised pytree as torch shows it; unchanged if torch does not know a type."""
    try:
        return str(pytree.treespec_loads(spec))
    except Exception:  # a plan that was edited by hand may hold anything
        return spec
