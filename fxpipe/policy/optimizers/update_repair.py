"""What a repair of late gradients does around a step of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxpipe.errors import PolicyError
from fxpipe.task.several_optimizers import stepped_by


class UpdateRepair:
    """Changes the updates of an optimizer's parameters. `fxpipe.policy.repair` has its name and its costs.

    Args:
        optimizer: the options of every group must show that it has momentum.
        delays: how many updates late the gradients of each parameter are; 0 if it is missing.

    Raises:
        PolicyError: a group has no momentum, or its options do not say.
    """

    name: ClassVar[str]
    without: ClassVar[str]
    """What happens without momentum, for the error."""
    entry: ClassVar[str] = ""
    form: ClassVar[Any] = None
    """Where a checkpoint keeps its state by the names of parameters, and of which type; empty without a state."""

    def __init__(self, optimizer: torch.optim.Optimizer, delays: Mapping[Tensor, int]) -> None:
        for number, group in enumerate(optimizer.param_groups):
            kind = stepped_by(optimizer, group).__name__
            where = f" in parameter group {number}" if len(optimizer.param_groups) > 1 else ""
            if momentum_of(group) is None:
                raise PolicyError(
                    f"{self.without} without momentum, and no option of {kind}{where} says that it has momentum",
                    hint=f"use SGD, RMSprop or Muon with momentum, Adam, AdamW or NAdam, or leave out +{self.name}; "
                    "your own optimizer can say it with `momentum` or `betas` in its defaults",
                )
            if not has_momentum(group):
                raise PolicyError(
                    f"{self.without} without momentum, and {kind}{where} has none",
                    hint=f"give {kind} momentum > 0, or leave out +{self.name}",
                )

    def before_step(self) -> None:
        """Called right before every `optimizer.step()`; the gradients are clipped and unscaled."""

    def after_step(self) -> None:
        """Called right after every `optimizer.step()`."""

    def state(self) -> list[tuple[Any, ...]]:
        """For each parameter with a state: the parameter, and what the next updates depend on. For `load`."""
        return []

    def load(self, remembered: Sequence[tuple[Any, ...]]) -> None:
        """Continue from another instance's `state`, whose parameters may have had other delays."""


def momentum_of(group: Mapping[str, Any]) -> float | None:
    """The momentum of a group, under any of its usual names; None if its options do not say."""
    betas = group.get("betas")
    first = betas[0] if isinstance(betas, (tuple, list)) and betas else group.get("beta1")
    value = group.get("momentum", first)
    return float(value) if isinstance(value, (int, float, Tensor)) else None


def has_momentum(group: Mapping[str, Any]) -> bool:
    """Whether a group's options say that its steps have momentum."""
    return (momentum_of(group) or 0.0) > 0
