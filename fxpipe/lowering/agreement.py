"""One minibatch's step, and how far one is from eager PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Agreement:
    """Largest relative errors against eager PyTorch.

    Attributes:
        gradients, buffers: of each parameter's gradient, and of each buffer's new value, by name.
        not_compared: why nothing is known of loss and gradients, whose errors are then none; '' if they were compared.
        not_finite: what is infinite or NaN in eager PyTorch itself: there only the places of that were compared.
            Buffers, such as masks, may be infinite.
        zero: the parameters whose gradients are zero in eager PyTorch, so that this batch says little of them.
        metrics: of each metric, against what it is of the whole batch, or what its values on the microbatches make.
        rounding: the errors that float32's own rounding explains, by gradient, or `THE_LOSS`: above, they are none.
    """

    loss: float
    gradients: dict[str, float]
    buffers: dict[str, float]
    not_compared: str = ""
    not_finite: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    rounding: Mapping[str, float] = field(default_factory=dict)

    @property
    def worst_gradient(self) -> tuple[str, float]:
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def largest(self) -> float:
        return max([self.loss, *self.gradients.values(), *self.buffers.values(), *self.metrics.values()])


@dataclass(frozen=True)
class Step:
    """What one minibatch gives: the loss, the mean gradients and the buffers' values after it, by first names.

    `metrics` has those of each batch that was stepped on: one of a whole minibatch, or one of each microbatch.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    metrics: tuple[dict[str, float], ...] = ()
