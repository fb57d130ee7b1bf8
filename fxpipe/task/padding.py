"""Padding of batches: named leaves get values appended, so that their lengths are multiples, and batches of few shapes.

`padding_of` reads what a user says of it, the plan keeps that, and `padded` does it wherever batches enter: it leaves a
batch alone that is padded already, so that nobody need know whether another has done it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import BatchError, FxpipeError, TaskError, listed
from fxpipe.plan.spec import LeafSpec, PadSpec
from fxpipe.task.batch import describe, is_named
from fxpipe.task.containers import flatten
from fxpipe.torch_private import pytree

Pad = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
"""By a leaf's name or key, what is appended along dimension 1, or that and the dimension; or makes that of a batch."""


def padded(batch: Any, padding: Sequence[PadSpec]) -> Any:
    """A batch as the stages see it: the same object if there is nothing to append.

    Leaves that it does not have, or that are no tensors of so many dimensions, are left alone: what is wrong with such
    a batch is said where it is compared with the captured ones.
    """
    if not padding:
        return batch
    spec = flatten(batch)[1]
    values, changed = [], False
    for path, value in pytree.tree_flatten_with_path(batch)[0]:
        name = "batch" + pytree.keystr(path)
        for rule in padding:
            if isinstance(value, Tensor) and is_named(name, [rule.leaf]):
                longer = _appended(value, rule)
                changed |= longer is not value
                value = longer
        values.append(value)
    return pytree.tree_unflatten(values, spec) if changed else batch


def _appended(tensor: Tensor, rule: PadSpec) -> Tensor:
    if max(rule.dims) >= tensor.dim():
        return tensor
    sizes = [
        math.ceil(size / rule.multiple) * rule.multiple if dim in rule.dims else size
        for dim, size in enumerate(tensor.shape)
    ]
    if sizes == list(tensor.shape):
        return tensor
    made = tensor.new_full(sizes, rule.value)
    made[tuple(slice(size) for size in tensor.shape)] = tensor
    return made


def padding_of(pad: Pad | None, pad_to: int | None, batches: Sequence[Any]) -> tuple[PadSpec, ...]:
    """What is padded, and with what, as the user says it.

    Args:
        pad: what is appended to which leaves.
        pad_to: of what lengths are to be multiples.
        batches: at least one, as the data give them: the first says what leaves there are, all which shapes.

    Raises:
        BatchError: nothing is named, or what is named cannot be padded so; lists the leaves.
        TaskError: `pad` failed, is no dictionary, or comes without `pad_to`.
    """
    if pad_to is None:
        if pad is not None:
            raise TaskError("pad says what is padded, and not to multiples of what", hint="give pad_to=64, too")
        return ()
    if isinstance(pad_to, bool) or not isinstance(pad_to, int) or pad_to < 1:
        raise TaskError(f"pad_to is {pad_to!r}, which is no length", hint="such as pad_to = 64")
    given = _given(pad, batches[0])
    leaves = describe(batches[0])[0]
    if not given:
        raise _nothing_named(pad_to, batches)
    if unknown := [name for name in given if not any(is_named(leaf.name, [name]) for leaf in leaves)]:
        raise BatchError(
            f"pad names {', '.join(unknown)}, which the batch does not have",
            hint=f"its leaves are {', '.join(leaf.name for leaf in leaves)}",
        )
    return tuple(_rule(name, said, pad_to, leaves) for name, said in given.items())


def _given(pad: Pad | None, batch: Any) -> dict[str, Any]:
    try:
        found = pad(batch) if callable(pad) else pad
    except FxpipeError:
        raise
    except Exception as error:
        raise TaskError(f"pad(batch) raised {type(error).__name__}: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TaskError(
            f"pad is {found!r}, which is no dictionary of leaves", hint='such as pad = {"input_ids": 0, "labels": -100}'
        )
    return dict(found)


def _rule(name: str, said: Any, multiple: int, leaves: Sequence[LeafSpec]) -> PadSpec:
    value, place = said if isinstance(said, tuple) and len(said) == 2 else (said, 1)
    places = tuple(place) if isinstance(place, (tuple, list)) else (place,)
    numbers = all(isinstance(dim, int) and not isinstance(dim, bool) for dim in places)
    if not isinstance(value, (bool, int, float)) or not numbers or not places:
        raise TaskError(
            f"pad gives {name} {said!r}, which is neither a number nor (a number, a dimension)",
            hint="a mask over pairs is padded in two: (0, (1, 2))",
        )
    found: set[tuple[int, ...]] = set()
    for leaf in leaves:
        if not is_named(leaf.name, [name]):
            continue
        if leaf.tensor is None:
            raise BatchError(f"pad names {leaf.name}, which is no tensor but {leaf.constant!r}")
        rank = len(leaf.tensor.shape)
        if wrong := [dim for dim in places if not -rank <= dim < rank]:
            raise BatchError(
                f"pad appends to {leaf.name} along dimension {wrong[0]}, and it has {rank}",
                hint=f'say along which: pad = {{"{name}": ({value!r}, 0)}}' if rank else "leave it out",
            )
        if not _holds(leaf.tensor.dtype, value):
            raise BatchError(f"pad appends {value!r} to {leaf.name}, whose {leaf.tensor.dtype} cannot hold it")
        found.add(tuple(sorted({dim % rank for dim in places})))
    if len(found) > 1:
        raise BatchError(
            f"pad names {name}, which is several leaves of different ranks: give each its full name, as "
            f"{next(leaf.name for leaf in leaves if is_named(leaf.name, [name]))}"
        )
    return PadSpec(name, value, found.pop(), multiple)


def _holds(dtype: str, value: Any) -> bool:
    kind: torch.dtype = getattr(torch, dtype)
    if kind == torch.bool:
        return value in (0, 1)
    if kind.is_floating_point or kind.is_complex:
        return abs(value) <= torch.finfo(kind).max or value in (math.inf, -math.inf) or value != value
    limits = torch.iinfo(kind)
    return limits.min <= value <= limits.max and value == int(value)


def _nothing_named(pad_to: int, batches: Sequence[Any]) -> BatchError:
    """The error that shows which leaves there are, and of how many sizes."""
    seen: dict[str, set[tuple[int, ...]]] = {}
    for leaf in (leaf for batch in batches for leaf in describe(batch)[0]):
        if leaf.tensor and leaf.tensor.shape:
            seen.setdefault(leaf.name, set()).add(leaf.tensor.shape)
    shown = [f"{name} ({', '.join(str([*shape]) for shape in sorted(shapes)[:3])})" for name, shapes in seen.items()]
    return BatchError(
        f"pad_to={pad_to} is asked for, and nothing says what is padded, and with what; the leaves are "
        + (listed(shown, 12) or "none"),
        hint="write into the model file (in Python: pad=…), with the values that model and loss ignore: "
        'pad = {"input_ids": 0, "labels": -100}',
        page="batch-shapes",
    )
