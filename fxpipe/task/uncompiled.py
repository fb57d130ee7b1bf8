"""A model without torch.compile's wrappers, which would put `_orig_mod` into the names of its weights."""

from __future__ import annotations

import functools

from torch import nn

from fxpipe.errors import TaskError, listed
from fxpipe.messages import warn
from fxpipe.torch_private import COMPILED, MODULES


def uncompiled(model: nn.Module) -> nn.Module:
    """The model, with plain modules instead of those that torch.compile wrapped; names these, once."""
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"the model is of type {type(model).__name__}, not a torch.nn.Module", hint="give the model itself"
        )
    paths = [path or "the model" for path, module in model.named_modules() if COMPILED in vars(module)[MODULES]]
    if not paths:
        return model
    for module in list(model.modules()):
        for name, child in module.named_children():
            if COMPILED in vars(child)[MODULES] and name != COMPILED:
                setattr(module, name, _plain(child))
    _say(listed([path.replace(f"{COMPILED}.", "") for path in paths], 3))
    return _plain(model)


@functools.cache
def _say(which: str) -> None:
    warn(
        f"torch.compile's wrapper is left out of {which}: weights have the names of the plain modules, and stages are "
        "compiled by --backend inductor"
    )


def _plain(module: nn.Module) -> nn.Module:
    while COMPILED in vars(module)[MODULES]:
        module = vars(module)[MODULES][COMPILED]
    return module
