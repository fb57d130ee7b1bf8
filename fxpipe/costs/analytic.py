"""What a node takes on a device that need not be here: its FLOPs and bytes, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fxpipe.ir.aten import is_view
from fxpipe.ir.program import size_of, value
from fxpipe.planner.device import Device

aten = torch.ops.aten
# They read no more of their first input than they write.
_SPARSE = {aten.embedding.default, aten.index_select.default, aten.gather.default, aten.index.Tensor}


def analytic_seconds(node: fx.Node, device: Device) -> float:
    """What a node takes on a device, from its FLOPs and the bytes it reads and writes; views take nothing."""
    if is_view(node):
        return 0.0
    written = size_of(value(node))
    inputs = [size_of(value(n)) for n in node.all_input_nodes]
    if node.target in _SPARSE and inputs:
        inputs[0] = min(inputs[0], written)
    return device.seconds(_flops(node), written + sum(inputs), _dtype(node))


def _dtype(node: fx.Node) -> str:
    """The dtype in which a node multiplies: its first floating-point input's."""
    tensors = [value(n) for n in node.all_input_nodes]
    found = next((t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()), torch.float32)
    return str(found).removeprefix("torch.")


def _attention_flops(query: Any, key: Any, values: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, values.shape))


def _attention_backward_flops(
    gradient: Any, query: Any, key: Any, values: Any, *_: Any, out_val: Any = None, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, values.shape))


# What torch's own registry lacks. By the operator's name with its packet: a torch without one has no formula for it.
_FLOPS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flops,
}


def _flops(node: fx.Node) -> float:
    packet = getattr(node.target, "overloadpacket", None)
    own = _FLOPS.get(str(packet))
    arguments = fx.map_arg(node.args, value)
    keywords = fx.map_arg(node.kwargs, value)
    if own is not None:
        return float(own(*arguments, **keywords))
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*arguments, **keywords, out_val=value(node)))
