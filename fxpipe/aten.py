"""What fxpipe must know about ATen operators: which are views, random, cheap."""

from __future__ import annotations

import operator

import torch
from torch import fx

aten = torch.ops.aten

# Neither tagged pointwise nor views, but as cheap: small structural work on masks, ids and casts.
_CHEAP = {
    aten._to_copy.default,
    aten.clone.default,
    aten.cat.default,
    aten.stack.default,
    aten.cumsum.default,
    aten.tril.default,
    aten.triu.default,
    aten.flip.default,
    aten.constant_pad_nd.default,
    aten._unsafe_view.default,
    aten.repeat.default,
}


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """Whether the value shares its input's memory (an element of a tuple counts)."""
    target = node.target
    if is_getitem(node) or target is aten._unsafe_view.default:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws from the random generator."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_cheap(node: fx.Node) -> bool:
    """Whether computing the value again costs no more than moving it: views, pointwise work, creation from nothing."""
    target = node.target
    if is_view(node) or target in _CHEAP:
        return True
    if not isinstance(target, torch._ops.OpOverload) or is_random(node):
        return False
    return torch.Tag.pointwise in target.tags or not node.all_input_nodes
