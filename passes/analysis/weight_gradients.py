"""Which backward nodes make weight gradients alone (W), and which others read their results (B)."""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.aten import is_getitem, is_view
from fxpipe.ir.program import Program, info

aten = torch.ops.aten
_SAME_NUMBERS = {aten._to_copy.default, aten.clone.default}


def mark_weight_gradients(program: Program) -> None:
    """Set `weight` on the backward nodes of a program whose units are numbered; this changes its records.

    A node is W if nothing reads it except

    - W nodes of its own unit: in the end every backward node serves weights, but those of earlier units through the
      gradient that crosses to them, and that is B;
    - what finishes a weight's gradient: views, casts and autograd's sums over several uses, up to the output. So
      the gradients of a tied weight are W in each of their units, and so is their sum.

    An operator that makes an input's and weights' gradients in one call is B, its elements stay with it, and so
    does what works on those alone. A W node may read B nodes; no B node reads W.
    """
    outputs = list(zip(program.output_nodes, program.outputs, strict=True))
    gradients = {n for n, o in outputs if o.kind == "gradient"} - {n for n, o in outputs if o.kind != "gradient"}
    backward = [n for n in program if info(n).phase == "B"]
    finishing: set[fx.Node] = set()
    found: set[fx.Node] = set()
    for node in reversed(backward):
        users = [n for n in node.users if n.op == "call_function"]
        if not users if node not in gradients else len(users) + 1 != len(node.users):
            continue  # nothing reads it, or an output of another kind does
        if _finishes(node) and finishing.issuperset(users):
            finishing.add(node)
        unit = info(node).unit
        if all(n in finishing or (n in found and info(n).unit == unit) for n in users):
            found.add(node)
    made_by_b: set[fx.Node] = set()  # weight gradients, or what they are made of
    for node in backward:
        sources = [n for n in node.all_input_nodes if n.op == "call_function" and info(n).phase == "B"]
        if is_getitem(node) and sources[0] not in found:
            stays = node in found
        else:
            stays = node in found and bool(sources) and made_by_b.issuperset(sources)
        if stays:
            made_by_b.add(node)
            found.remove(node)
    for node in backward:
        info(node).weight = node in found


def _finishes(node: fx.Node) -> bool:
    """Whether the value is, up to layout and dtype, what it reads, or autograd's sum of several such."""
    return is_view(node) or node.target in _SAME_NUMBERS or bool(node.meta.get("accumulates"))
