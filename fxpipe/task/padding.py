"""Padding of batches: values are appended to named leaves, so that their lengths are multiples and shapes are few.

`padding_of` reads what the user asks, the plan keeps it, and `Batch.padded` pads wherever batches enter. It leaves a
padded batch unchanged, so callers need not know whether it was already called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import BatchError, FxpipeError, TaskError, listed
from fxpipe.plan.spec import PadSpec
from fxpipe.task.batch import Batch, is_named, tensor_spec

Pad = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
"""By a leaf's name or key, the value appended along dimension 1, or value and dimension; or a function of a batch."""

_EXAMPLE = 'pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}'


def padding_of(pad: Pad | None, pad_to: int | None, batches: Sequence[Batch]) -> tuple[PadSpec, ...]:
    """Which leaves are padded, and with what, from the user's options.

    The first batch, as the data give it, shows the leaves, and all show the shapes.
    """
    if pad_to is None:
        if pad is not None:
            raise TaskError("pad is given without pad_to, the multiple to pad to", hint="give pad_to=64, too")
        return ()
    if isinstance(pad_to, bool) or not isinstance(pad_to, int) or pad_to < 1:
        raise TaskError(f"pad_to is {pad_to!r}, not a length", hint="such as pad_to = 64")
    rules, first = _given(pad, batches[0].given), batches[0]
    if not rules:
        raise _nothing_named(pad_to, batches)
    if unknown := [name for name in rules if not any(is_named(leaf.name, [name]) for leaf in first.leaves)]:
        raise BatchError(
            f"pad names {', '.join(unknown)}, which the batch does not have",
            hint=f"its leaves are {', '.join(first.names)}",
        )
    return tuple(_rule(name, rule, pad_to, first) for name, rule in rules.items())


def _given(pad: Pad | None, batch: Any) -> dict[str, Any]:
    try:
        rules = pad(batch) if callable(pad) else pad
    except FxpipeError:
        raise
    except Exception as error:
        raise TaskError(f"pad(batch) raised {type(error).__name__}: {error}") from error
    if rules is None:
        return {}
    if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules):
        raise TaskError(f"pad is {rules!r}, not a dictionary of leaves", hint=f"such as {_EXAMPLE}")
    return dict(rules)


def _rule(name: str, rule: Any, multiple: int, batch: Batch) -> PadSpec:
    value, place = rule if isinstance(rule, tuple) and len(rule) == 2 else (rule, 1)
    places = tuple(place) if isinstance(place, (tuple, list)) else (place,)
    numbers = all(isinstance(dim, int) and not isinstance(dim, bool) for dim in places)
    if not isinstance(value, (bool, int, float)) or not numbers or not places:
        raise TaskError(
            f"pad gives {name} {rule!r}, which is neither a number nor (a number, a dimension)",
            hint="a mask over pairs is padded in two: (0, (1, 2))",
        )
    dims: set[tuple[int, ...]] = set()
    leaves = {leaf: value for leaf, value in zip(batch.names, batch.values, strict=True) if is_named(leaf, [name])}
    for leaf, tensor in leaves.items():
        if not isinstance(tensor, Tensor):
            raise BatchError(f"pad names {leaf}, which is {tensor!r}, not a tensor")
        rank = tensor.dim()
        if wrong := [dim for dim in places if not -rank <= dim < rank]:
            raise BatchError(
                f"pad appends to {leaf} along dimension {wrong[0]}, but it has {rank}",
                hint=f'name the dimension: pad = {{"{name}": ({value!r}, 0)}}' if rank else "leave it out",
            )
        if not _holds(tensor.dtype, value):
            dtype = tensor_spec(tensor).dtype
            raise BatchError(f"pad appends {value!r} to {leaf}, whose {dtype} cannot hold it")
        dims.add(tuple(sorted({dim % rank for dim in places})))
    if len(dims) > 1:
        raise BatchError(
            f"pad names {name}, which is several leaves of different ranks: give each its full name, as "
            f"{next(iter(leaves))}"
        )
    return PadSpec(name, value, dims.pop(), multiple)


def _holds(kind: torch.dtype, value: Any) -> bool:
    if kind == torch.bool:
        return value in (0, 1)
    if kind.is_floating_point or kind.is_complex:
        return abs(value) <= torch.finfo(kind).max or value in (math.inf, -math.inf) or value != value
    limits = torch.iinfo(kind)
    return limits.min <= value <= limits.max and value == int(value)


def _nothing_named(pad_to: int, batches: Sequence[Batch]) -> BatchError:
    """The error that shows the leaves and their sizes."""
    seen: dict[str, set[tuple[int, ...]]] = {}
    for name, tensor in (row for batch in batches for row in batch.tensors.items()):
        if tensor.dim():
            seen.setdefault(name, set()).add(tuple(tensor.shape))
    shown = [f"{name} ({', '.join(str([*shape]) for shape in sorted(shapes)[:3])})" for name, shapes in seen.items()]
    return BatchError(
        f"pad_to={pad_to} is given without pad, which says what is padded and with what; the leaves are "
        + (listed(shown, 12) or "none"),
        hint=f"write into the model file (in Python: pad=…), with the values that model and loss ignore: {_EXAMPLE}",
        page="batch-shapes",
    )
