"""Puts a model into eval mode for a while, then restores it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fxpipe.errors import CaptureError


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model is in eval mode inside; afterwards every submodule is in its former mode.

    Raises:
        CaptureError: eval() changes weights, as in modules that merge other weights into theirs: what is evaluated
            would not be what is trained. All values are restored.
    """
    modules, before = list(model.modules()), model.training
    modes = [module.training for module in modules]
    tensors = _tensors(model)
    memories = {name: tensor.detach() for name, tensor in tensors.items()}
    # What modules do themselves about a mode may write into tensors; torch's own train() does not.
    values = {name: old.clone() for name, old in memories.items() if any(map(_has_own_way, modules))}
    changed: list[str] = []
    try:
        model.eval()
        now = _tensors(model)
        changed = [
            name
            for name, old in memories.items()
            if now.get(name) is not tensors[name]
            or _memory(now[name]) != _memory(old)
            or (name in values and not old.is_meta and not _equal(old, values[name]))
        ]
        if changed:
            raise CaptureError(
                f"the model's eval() changes {', '.join(changed[:5])}{' and more' if changed[5:] else ''}",
                hint="let forward() do, depending on self.training, what train() and eval() do to the weights",
            )
        yield
    finally:
        if changed:
            model.train(before)  # undoes what eval() did to attributes, too; then the exact values come back
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for name in changed:
            if name in values:
                memories[name].copy_(values[name])
            tensors[name].data = memories[name]


def _has_own_way(module: nn.Module) -> bool:
    """Whether it does more than torch's modules when its mode changes."""
    return "train" in vars(module) or (type(module).train, type(module).eval) != (nn.Module.train, nn.Module.eval)


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
