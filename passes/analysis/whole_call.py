"""What a call of a microbatch's step is in the step on the whole batch: its numbers and shapes there, by `next_to`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir.program import value
from fxpipe.torch_private import OpOverload, pytree, schema_of

aten = torch.ops.aten
WHOLE = "whole"
"""The key in `node.meta` of a `WholeCall`, or of the reason, in words, why the step on the whole batch has none."""

Place = int | str
"""The place of a call's argument: its position, or its name."""


@dataclass(frozen=True)
class WholeCall:
    """A call, or an input, of the step on the whole batch.

    It has the shape of its value, or of each value of a tuple, None for what is no tensor; the arguments that are no
    tensors; and the value of a constant that differs there.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    arguments: dict[Place, Any]
    value: Tensor | None = None


def whole_call(node: fx.Node) -> WholeCall | str | None:
    """What `next_to` found for a node: None if it was not called, or for a call that computes nothing."""
    return node.meta.get(WHOLE)


def shapes_of(shown: Any) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of a value, or of each value of a tuple."""
    several = shown if isinstance(shown, (tuple, list)) else (shown,)
    return tuple(tuple(v.shape) if isinstance(v, Tensor) else None for v in several)


def arguments_of(node: fx.Node) -> dict[Place, Any]:
    """The arguments of a call that are not tensors."""
    places: dict[Place, Any] = dict(enumerate(node.args))
    places.update(node.kwargs)
    return {
        place: a for place, a in places.items() if not any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(a))
    }


def changed_arguments(node: fx.Node) -> dict[Place, Any]:
    """The arguments that differ in the step on the whole batch, with their values there."""
    call = whole_call(node)
    if not isinstance(call, WholeCall):
        return {}
    arguments = arguments_of(node)
    return {place: a for place, a in call.arguments.items() if place in arguments and not _equal(arguments[place], a)}


def changed_numbers(node: fx.Node) -> dict[Place, Any]:
    """The numbers that differ in the step on the whole batch, with their values there, without sizes."""
    return {p: a for p, a in changed_arguments(node).items() if type_of(node, p) in ("number", "float", "Tensor")}


def type_of(node: fx.Node, place: Place) -> str:
    """The type of an argument by the operator's schema, where numbers may replace tensors."""
    if not isinstance(node.target, OpOverload):
        return ""
    schema = schema_of(node.target)
    entry = schema.arguments[place] if isinstance(place, int) else next(a for a in schema.arguments if a.name == place)
    kind = str(entry.type)
    return kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind


VIEWS = {aten._unsafe_view.default: aten.view.default, aten._reshape_alias.default: aten.view.default}
"""Views that are `view` by another name."""

_NOTHING = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.clone.default}


def computes_nothing(node: fx.Node) -> bool:
    """Whether a call returns its input: it copies, or gives it the shape that it has."""
    if node.target in _NOTHING:
        return True
    if node.target in (aten.view.default, aten.expand.default, *VIEWS):
        return bool(value(node).shape == value(node.all_input_nodes[0]).shape)
    return False


def whole_shape(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of a value in the step on the whole batch, if known."""
    while whole_call(node) is None and node.op == "call_function" and computes_nothing(node):
        node = node.all_input_nodes[0]
    call = whole_call(node)
    return call.shapes[0] if isinstance(call, WholeCall) else None


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))
