"""The user's model, without torch.compile's wrappers, and loss, from which a training step can be captured again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fxpipe.errors import TaskError, listed
from fxpipe.messages import warn
from fxpipe.task.hooks import Loss
from fxpipe.task.loss_weights import LossWeight
from fxpipe.torch_private import COMPILED, MODULES


@dataclass(frozen=True)
class StepHooks:
    """The hooks that a step needs."""

    model: Callable[[], nn.Module]  # makes the model as it was compiled, or gives the same object
    loss: Loss  # `loss(model, batch)`
    loss_weight: LossWeight | None = None  # the build's, if it has one
    same: bool = False  # the model is the one that was compiled: its constants are the build's
    kept: Callable[[], nn.Module | None] = lambda: None  # that model in any mode; None if it is gone
    trained: Mapping[str, bool] = field(default_factory=dict)  # whether each of its parameters required gradients
    # what a run calls between steps, by name; see `fxpipe.tracing.hook_state`
    between: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @staticmethod
    def of_compiled(model: nn.Module, loss: Loss, loss_weight: LossWeight | None) -> StepHooks:
        """Of a model that is being compiled: it is not kept alive, and must not have changed when it is needed.

        Its `model` raises TaskError if the model is gone, or in another mode.
        """
        compiled_model, modes = weakref.ref(model), {name: part.training for name, part in model.named_modules()}

        def again() -> nn.Module:
            compiled = compiled_model()
            if compiled is None:
                raise TaskError(
                    "the model that was compiled is gone", hint="keep it, or give model= and loss= with the options"
                )
            changed = [name for name, part in compiled.named_modules() if part.training != modes.get(name)]
            if changed:
                raise TaskError(
                    f"the model that was compiled is now in another mode ({changed[0] or 'the whole of it'})",
                    hint="call model.train() again, or give model=, a function that makes the model, and loss=",
                )
            return compiled

        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        return StepHooks(again, loss, loss_weight, same=True, kept=compiled_model, trained=trained)


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
