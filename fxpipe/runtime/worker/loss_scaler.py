"""Scales the loss under float16: `torch.amp.GradScaler` over all workers' gradients.

Workers exchange whether gradients overflowed as they exchange norms (`UpdateNotes`). So all make or skip the same
updates and have the same scale, which worker 0 knows when the next minibatch begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from fxpipe.checkpoint.shard import Count
from fxpipe.errors import NotFiniteError
from fxpipe.observe.record import ScaledStep
from fxpipe.plan.spec import LOSS_SCALE, StepSpec
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.schedule.base import check_loss_scaling
from fxpipe.torch_private import amp_update_scale_, unscale_and_check_

GROWTH = 2.0
"""The factor after `interval` good updates, as in torch."""

BACKOFF = 0.5
"""The factor after gradients that overflowed, as in torch."""

LEAST = 1.0
"""At this scale the gradients of the loss itself overflow, and the run ends."""


@dataclass
class Scale:
    """The scale of one run, the same on all workers.

    Attributes:
        value: what the next minibatch's loss is multiplied by.
        good: updates since it last changed.
        skipped: updates skipped so far.
        in_row: updates skipped since the last one that was made.
    """

    value: Annotated[float, Meta(gt=0)]
    good: Count = 0
    skipped: Count = 0
    in_row: Count = 0

    def update(self, overflowed: bool, interval: int) -> None:
        """As `GradScaler.update`, by the same function of torch."""
        scale, good = torch.tensor(self.value), torch.tensor(self.good, dtype=torch.int32)
        amp_update_scale_(scale, good, torch.tensor([float(overflowed)]), GROWTH, BACKOFF, interval)
        self.value, self.good = float(scale), int(good)
        self.skipped += overflowed
        self.in_row = self.in_row + 1 if overflowed else 0


class LossScaler(UpdatePart):
    """Unscales one worker's gradients, and skips an update if any worker's gradients overflowed.

    Attributes:
        scale: of the next minibatch.
        last: how the last minibatch's loss was scaled; None before the first.
    """

    entry = "loss_scale"
    form = Scale
    up = down = 1

    def __init__(self, setting: WorkerSetting) -> None:
        self.scale = Scale(setting.options.loss_scale)
        self.last: ScaledStep | None = None
        self.worker = setting.worker
        self._parameters = list(setting.trained.values())
        self._interval = setting.options.loss_scale_interval
        self._divisor = setting.plan.loss_divisor
        self._device = setting.device
        self._found = 0.0

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        """The loss scaler, if the build scales its loss."""
        check_loss_scaling(setting.recipe.schedule, setting.plan.precision.autocast)
        if setting.plan.scales_loss:
            yield cls(setting)

    def leaves(self, leaves: Sequence[Any], step: StepSpec) -> Sequence[Any]:
        """With the present scale.

        The scale is divided here, not the sum of the microbatches' gradients: so no gradient is larger than in the
        backward of the whole batch, and their sum is the gradient of the scaled loss.
        """
        scale = torch.full((), self.scale.value / self._divisor, device=self._device)
        return [scale if spec.name == LOSS_SCALE else leaf for spec, leaf in zip(step.batch, leaves, strict=True)]

    def state(self, version: int) -> Any:
        return vars(self.scale)

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        if states:
            self.scale = Scale(**vars(states[0]))

    def measure(self, minibatch: int) -> None:
        self._found = unscale([p.grad for p in self._parameters if p.grad is not None], self.scale.value)

    def pass_up(self, behind: Tensor) -> Tensor:
        self._found = max(self._found, float(behind))
        return torch.tensor([self._found], dtype=torch.float64)

    def pass_down(self, before: Tensor) -> Tensor:
        if self.worker > 0:
            self._found = float(before)
        return torch.tensor([self._found], dtype=torch.float64)

    def apply(self, minibatch: int) -> None:
        """Set `skips`, and the next minibatch's scale.

        Raises:
            NotFiniteError: gradients overflowed at every scale down to the smallest.
        """
        self.skips = self._found > 0
        self.last = ScaledStep(self.scale.value, self.skips)
        self.scale.update(self.skips, self._interval)
        if self.skips and self.scale.value < LEAST:
            raise NotFiniteError(
                f"the gradients of step {minibatch + 1} overflow float16 even at a loss scale of {self.last.scale:g}: "
                f"{self.scale.in_row} steps in a row made no update",
                hint="an unscaled gradient is infinite, NaN or beyond 65504: look at that batch, lower the learning "
                "rate, clip gradients (--clip-norm), use a mean instead of a sum as the loss; or compile with "
                "--autocast bf16",
                page="not-finite",
            )


def unscale(gradients: Sequence[Tensor], scale: float) -> float:
    """Divide gradients by the scale, in place, as GradScaler does; 1 if one of them is infinite or NaN, else 0."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        kinds.setdefault((real.device, real.dtype), []).append(real)
    found = 0.0
    for (device, _), alike in kinds.items():
        inverse = torch.full((), float(torch.full((), scale).double().reciprocal()), device=device)
        flag = torch.zeros(1, device=device)
        unscale_and_check_(alike, flag, inverse)
        found = max(found, float(flag))
    return found
