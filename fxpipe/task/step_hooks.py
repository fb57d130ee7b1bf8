"""The user's model and loss, from which a training step can be captured again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fxpipe.errors import TaskError
from fxpipe.task.hooks import Loss
from fxpipe.task.loss_weights import LossWeight


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
