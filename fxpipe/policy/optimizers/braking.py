"""Adaptive braking: a gradient counts less along the velocity, and more against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.errors import PolicyError
from fxpipe.policy.optimizers.update_repair import UpdateRepair

STRENGTH = 1.0
"""ρ, the largest with which no gradient changes its sign."""

VELOCITIES = ("momentum_buffer", "exp_avg")
"""Where optimizers keep v in a parameter's state: SGD, RMSprop and Muon; Adam, AdamW, NAdam and similar ones."""


class Braking(UpdateRepair):
    """Scales gradients by their alignment with the velocity, before the optimizer's step.

        g ← (1 − ρ·cos(g, v))·g

    g is the gradient, clipped and unscaled, and v the optimizer's velocity before the step: SGD's momentum buffer or
    Adam's first moment. So oscillation is damped. Before the first update, and where g or v is 0, the gradient is as it
    was.

    Each parameter has a cosine of its own: no worker needs another one's, and other cuts give the same scales. Nothing
    is read from the device.

    Cost: no copies; a product of the largest parameter's size while it is summed up.

    From: Venigalla et al. 2020, arXiv 2007.01397. Only the abstract could be read; the formula is known at second hand,
    and a cosine for each parameter and the value of ρ are our choice.

    Raises:
        PolicyError: as `UpdateRepair`; after the first step, if the optimizer keeps no velocity under these names.
    """

    name: ClassVar[str] = "brake"
    without: ClassVar[str] = "adaptive braking does nothing"

    def __init__(self, optimizer: torch.optim.Optimizer, delays: Mapping[Tensor, int]) -> None:
        super().__init__(optimizer, delays)
        self._optimizer = optimizer
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._checked = False

    @torch.no_grad()
    def before_step(self) -> None:
        for parameter in self._parameters:
            velocity = self._velocity(parameter)
            if parameter.grad is not None and velocity is not None:
                parameter.grad.mul_(1.0 - STRENGTH * cosine(parameter.grad, velocity))

    def after_step(self) -> None:
        if self._checked:
            return
        self._checked = True
        if any(p.grad is not None and self._velocity(p) is None for p in self._parameters):
            raise PolicyError(
                f"adaptive braking needs the optimizer's velocity, and {type(self._optimizer).__name__} keeps none as "
                + " or ".join(map(repr, VELOCITIES)),
                hint="use SGD, RMSprop or Muon with momentum, Adam, AdamW or NAdam, or leave out +brake; your own "
                "optimizer can keep its momentum in state[parameter]['momentum_buffer']",
            )

    def _velocity(self, parameter: Tensor) -> Tensor | None:
        state = self._optimizer.state.get(parameter, {})
        return next((state[name] for name in VELOCITIES if state.get(name) is not None), None)


def cosine(one: Tensor, other: Tensor) -> Tensor:
    """The cosine between two tensors of a shape, on their device; 0 if one of them is 0."""
    one, other = (torch.view_as_real(t) if t.is_complex() else t for t in (one, other))
    one, other = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (one, other))
    norms = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    return (one * other).sum() / norms.clamp_min(torch.finfo(norms.dtype).tiny)
