"""Containers of batches that torch's pytrees do not know: mappings, such as a tokenizer's BatchEncoding, and
dataclasses.

Their types are registered when a batch first has one, so a batch reaches the model in its original container.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import BatchError
from fxpipe.torch_private import pytree


def flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a batch with any containers, and its structure; a list of strings is one leaf.

    Raises:
        BatchError: a container cannot be rebuilt from its content.
    """
    while True:
        leaves, spec = pytree.tree_flatten(batch, is_leaf=is_text)
        unknown = {type(leaf): leaf for leaf in leaves if _is_container(leaf)}
        if not unknown:
            return leaves, spec
        for kind, value in unknown.items():
            _register(kind, value)


def is_text(value: Any) -> bool:
    """Whether it is a list of strings, possibly nested or empty: names of files, words."""
    return type(value) in (list, tuple) and all(type(v) is str or is_text(v) for v in value)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _register(kind: type, value: Any) -> None:
    names = None if isinstance(value, Mapping) else [field.name for field in dataclasses.fields(value) if field.init]

    def parts(value: Any) -> tuple[list[Any], list[Any]]:
        if names is None:
            return list(value.values()), list(value.keys())
        return [getattr(value, name) for name in names], names

    def parts_by_name(value: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
        values, keys = parts(value)
        entry = pytree.MappingKey if names is None else pytree.GetAttrKey
        return [(entry(key), each) for key, each in zip(keys, values, strict=True)], keys

    def made(values: Iterable[Any], keys: list[Any]) -> Any:
        held = dict(zip(keys, values, strict=True))
        return kind(held) if names is None else kind(**held)

    values, keys = parts(value)
    try:
        again = made(values, keys)
        held, known = parts(again)
        same = known == keys and all(a is b for a, b in zip(held, values, strict=True))
        if names is not None:
            more = [field.name for field in dataclasses.fields(value) if not field.init]
            same = same and all(_alike(getattr(again, name), getattr(value, name)) for name in more)
    except Exception:
        same = False
    if not same:
        raise BatchError(
            f"the batch holds a {kind.__module__}.{kind.__qualname__}, which cannot be rebuilt from its content",
            hint="let train_data() give a dict, list or tuple of tensors",
        )
    name = f"{kind.__module__}.{kind.__qualname__}"
    pytree.register_pytree_node(kind, parts, made, serialized_type_name=name, flatten_with_keys_fn=parts_by_name)


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
