"""The metrics of a training step while it is traced: checked, and made scalars that no gradient goes through."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.errors import CaptureError
from fxpipe.torch_private import pytree

TAKEN = ("loss", "lr", "grad_norm", "loss_scale", "samples_per_second", "tokens_per_second", "tflops_per_device", "mfu")
"""What is shown of every step next to its metrics."""


def metric_tensors(metrics: Mapping[Any, Any], device: str, where: str | None) -> dict[str, Tensor]:
    """The metrics as float32 scalars by name, without gradients; numbers become constants on the device.

    Refuses one that has no name, the name of something else, or is not one real number.
    """
    return {name: _scalar(name, value, device, where) for name, value in metrics.items()}


def check_metric(hook: str, name: Any, value: Any, where: str | None, gathers: bool = False) -> None:
    """Refuse what is no metric: it has no name, or is not one real number, or where it `gathers`, no tensor.

    `hook` says in words what returned it.
    """
    if not isinstance(name, str) or not name or "\n" in name:
        raise CaptureError(f"{hook} calls a metric {name!r}", where=where, hint="name metrics by strings of one line")
    if not isinstance(value, (Tensor, numbers.Real)):
        raise CaptureError(
            f"{hook} returned the metric {name!r} as a {type(value).__name__}, not as a number",
            where=where,
            hint="return a scalar tensor or a number",
        )
    many = isinstance(value, Tensor) and value.numel() != 1 and not (gathers and value.dim())
    if isinstance(value, Tensor) and (many or value.is_complex()):
        raise CaptureError(
            f"{hook} returned the metric {name!r} as a tensor of shape {list(value.shape)} and {value.dtype}, not as "
            "one real number",
            where=where,
            hint="reduce it: .mean() or .sum(); metrics_of_all() takes an evaluation's tensors of all batches",
        )


def _scalar(name: Any, value: Any, device: str, where: str | None) -> Tensor:
    check_metric("loss(model, batch)", name, value, where)
    if name in TAKEN:
        raise CaptureError(
            f"loss(model, batch) returned a metric named {name!r}, which the step has already",
            where=where,
            hint="choose another name, such as 'ce'",
        )
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=torch.float32, device=device)
    value = value.detach().reshape(()) if value.dim() else value.detach()
    if value.device.type != torch.device(device).type and not value.is_meta:
        return value.to(device, torch.float32)
    return value.float().clone()  # a copy: it may be the loss, a parameter, or have two names


def forget_numbers(graph: fx.Graph, count: int) -> None:
    """Remove autograd's numbers from the forward nodes that serve only the step's metrics: they have no backward.

    A node without gradient has the number of the next call, and would be given that call's backward. The metrics are
    the last `count` of the step's own outputs.
    """
    output = graph.output_node()
    described = list(zip(pytree.tree_leaves(output.args[0]), output.meta["desc"], strict=True))
    plain = [(node, desc) for node, desc in described if type(desc).__name__ == "PlainAOTOutput"]
    metrics = {desc for _, desc in sorted(plain, key=lambda pair: pair[1].idx)[len(plain) - count :]}
    needed = {node for node, desc in described if isinstance(node, fx.Node) and desc not in metrics}
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        if node in needed or (not node.users) or any(user in needed for user in node.users if user is not output):
            needed.add(node)
        else:
            node.meta.pop("seq_nr", None)
