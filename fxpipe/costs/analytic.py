"""The time of a node on a device that need not be present, computed from FLOPs and bytes, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """The time of a node on a device, from its FLOPs and the bytes it reads and writes; 0 for views."""
    if is_view(node):
        return 0.0
    written = size_of(value(node))
    inputs = [size_of(value(n)) for n in node.all_input_nodes]
    if node.target in _SPARSE and inputs:
        inputs[0] = min(inputs[0], written)
    return device.seconds(flops_of(node), written + sum(inputs), dtype_of(node))


def dtype_of(node: fx.Node) -> str:
    """The dtype in which a node multiplies: its first floating-point input's."""
    tensors = [value(n) for n in node.all_input_nodes]
    dtype = next((t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()), torch.float32)
    return str(dtype).removeprefix("torch.")


def _attention_flops(query: Any, key: Any, values: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, values.shape))


def _attention_backward_flops(gradient: Any, query: Any, key: Any, values: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, values.shape))


def _grouped_flops(left: Any, right: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """For rows times the matrix of their group; for two matrices, the groups divide the dimension summed over."""
    written = int(left.shape[0] * right.shape[1]) if left.dim() == right.dim() == 2 else out_val.numel()
    return 2 * int(left.shape[-1]) * written


def _vector_flops(matrix: Any, vector: Any, **_: Any) -> int:
    return 2 * int(matrix.numel())


def _recurrent_flops(kind: str, input: Any, hidden: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Each step multiplies every matrix by the samples."""
    return 2 * int(input.shape[0] * input.shape[1]) * sum(w.numel() for w in weights if w.dim() == 2)


def _recurrent_backward_flops(gradients: Any, results: Any, *layer: Any, **_: Any) -> int:
    return 2 * _recurrent_flops(*layer)


# What torch's own registry lacks. By the names of operator and packet: some versions of torch lack one of these.
FLOPS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flops,
    "aten._grouped_mm": _grouped_flops,
    "aten.mv": _vector_flops,
    "fxpipe.recurrent_layer": _recurrent_flops,
    "fxpipe.recurrent_layer_backward": _recurrent_backward_flops,
}


def flops_of(node: fx.Node, formulas: Mapping[str, Callable[..., int]] = FLOPS) -> float:
    """The FLOPs of a node that multiplies matrices, 0 for all others; `formulas` take precedence over torch's."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = formulas.get(str(packet)) or flop_registry.get(packet)
    if formula is None:
        return 0.0
    return float(formula(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value), out_val=value(node)))
