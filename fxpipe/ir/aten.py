"""Facts about ATen operators: which are views, random, cheap."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpipe.torch_private import OpOverload, schema_of

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


_NOTHING = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}
_UNDO_THEMSELVES = {aten.t.default, aten._conj.default, aten._neg_view.default}

# Norms whose statistics (their second and third value) have float32 where low-precision input meets float32 weights.
_NORMS = {
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
}


def true_value(node: fx.Node, traced: Any) -> Any:
    """A node's fake value, corrected where torch's is wrong: dtypes of norms under autocast on a CPU (torch 2.13)."""
    inputs = [n.meta["val"] for n in node.all_input_nodes]
    if node.target in (operator.getitem, aten.detach.default, aten.alias.default):
        return inputs[0][node.args[1]] if is_getitem(node) else inputs[0]
    tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
    if not tensors or tensors[0].device.type != "cpu" or {v.dtype for v in tensors} == {tensors[0].dtype}:
        return traced
    if node.target in _NORMS and tensors[0].dtype.itemsize == 2:
        return (traced[0], *(v.to(torch.float32) for v in traced[1:3]), *traced[3:])
    if node.target is aten.native_group_norm_backward.default:
        return (traced[0].to(inputs[1].dtype), *traced[1:])
    return traced


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def repeats(node: fx.Node) -> fx.Node | None:
    """The earlier value that a call merely repeats: it does nothing, or undoes the previous call; else None."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target in _NOTHING:
        return source
    if node.target in _UNDO_THEMSELVES and source.target is node.target:
        return source.all_input_nodes[0]
    return None


def is_view(node: fx.Node) -> bool:
    """Whether the value shares its input's memory (an element of a tuple counts)."""
    return is_getitem(node) or is_view_operator(node.target)


def is_view_operator(target: object) -> bool:
    """Whether an operator's result shares its input's memory."""
    if target is aten._unsafe_view.default:
        return True
    if not isinstance(target, OpOverload):
        return False
    returns = schema_of(target).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def viewed(node: fx.Node) -> fx.Node:
    """The value whose memory a view shares; the node itself if it is not a view."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        parent = node.all_input_nodes[0]
        if isinstance(parent.meta.get("val"), (tuple, list)):
            break  # an element of a tuple has its own memory
        node = parent
    return node


def is_pointwise(node: fx.Node) -> bool:
    """Whether the operator computes each element of its result from the elements at the same place."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws from the random generator; attention does only if it drops something out."""
    target = node.target
    if not (isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags):
        return False
    for i, argument in enumerate(schema_of(target).arguments):
        if argument.name == "dropout_p":
            probability = node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(probability != 0)
    return True


def is_sparse(node: fx.Node) -> bool:
    """Whether the value has no strides: indices and values instead."""
    shown = node.meta.get("val")
    return isinstance(shown, torch.Tensor) and shown.layout != torch.strided


def is_cheap(node: fx.Node) -> bool:
    """Whether computing the value again costs no more than moving it: views, pointwise work, creation from nothing.

    A sparse value counts as cheap: it cannot be moved at all.
    """
    target = node.target
    if is_view(node) or target in _CHEAP or is_sparse(node):
        return True
    if not isinstance(target, OpOverload) or is_random(node):
        return False
    return is_pointwise(node) or not node.all_input_nodes
