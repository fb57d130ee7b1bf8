"""What a node of the eval graph is: arithmetic on sizes, a draw of random numbers; its module and line."""

from __future__ import annotations

import torch
from torch import fx

from fxpipe import user_lines
from fxpipe.ir.aten import is_random

aten = torch.ops.aten


def is_size(node: fx.Node) -> bool:
    """Whether the node is arithmetic on sizes: its value is not a tensor, and every stage computes it itself."""
    return node.op == "call_function" and isinstance(
        node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def draws(node: fx.Node) -> bool:
    """Whether the node's value depends on random numbers."""
    if node.target in (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default):
        return bool(node.args[1]) and bool(node.args[2])
    if node.target is aten.native_dropout.default:
        return bool(node.args[2])
    # Recurrent layers and attention are tagged random for a dropout that eval mode has turned off.
    names = ("lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention", "rrelu", "batch_norm")
    return is_random(node) and not str(node.target).removeprefix("aten.").startswith(names)


def own_name(target: str) -> str:
    """The model's own name for export's `target`: export sees the model inside a module of ours."""
    return target.removeprefix("model.")


def module_of(node: fx.Node) -> str:
    """The path of the module whose forward made the node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()), ("",))[0])
    return "" if path == "model" else own_name(path)


def place_of(node: fx.Node) -> str | None:
    """`model.py:12: the line`, of the innermost frame in the user's code; else the module."""
    return user_lines.user_stack(node.meta.get("stack_trace") or "") or module_of(node) or None
