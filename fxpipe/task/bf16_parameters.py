"""`--params bf16`: what of a model computes in bfloat16, as after `model.to(torch.bfloat16)`."""

from __future__ import annotations

import torch
from torch import nn

from fxpipe.errors import CaptureError, listed
from fxpipe.task.wrapped_tensors import packed_as
from fxpipe.torch_private import NormBase

KEPT, COMPUTED = torch.float32, torch.bfloat16


def check_parameters(model: nn.Module) -> None:
    """Refuse parameters that float32 owners would make less precise, or that are no real numbers."""
    others = [
        f"{name} ({str(p.dtype).removeprefix('torch.')})"
        for name, p in model.named_parameters()
        if p.dtype not in (KEPT, COMPUTED) and (p.is_floating_point() or p.is_complex()) and not packed_as(p)
    ]
    if others:
        raise CaptureError(
            f"--params bf16 is for parameters in float32 or bfloat16, not for {listed(others, 4)}",
            hint="return model.float() from model(), or leave out --params",
        )


def narrowed(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers that are to become bfloat16; none if the model has bfloat16 parameters already.

    Batch and instance norms stay as they are, as under autocast: small changes of their statistics would be lost. So
    do packed weights: another type would unpack them.
    """
    if any(p.dtype == COMPUTED and not packed_as(p) for p in model.parameters()):
        return []
    modules = [module for module in model.modules() if not isinstance(module, NormBase)]
    held = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    return [tensor for tensor in held if tensor.is_floating_point() and not packed_as(tensor)]


def narrow(model: nn.Module, *, trained: bool = True) -> None:
    """Let the model compute in bfloat16, in place: its tensors get other data; if `trained`, also parameters that
    require a gradient, of which a run keeps more digits."""
    for tensor in narrowed(model):
        if trained or not tensor.requires_grad:
            tensor.data = tensor.data.to(COMPUTED)
