"""Scales the loss under float16: `torch.amp.GradScaler` over all workers' gradients.

Workers exchange whether gradients overflowed as they exchange norms (`update_notes`). So all make or skip the same
updates and have the same scale, which worker 0 knows when the next minibatch begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import NotFiniteError, RunError
from fxpipe.observe.record import ScaledStep
from fxpipe.plan.spec import LOSS_SCALE, Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.worker.update_notes import NoteField
from fxpipe.schedule.loss_scaling import check_loss_scaling
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

    value: float
    good: int = 0
    skipped: int = 0
    in_row: int = 0

    def update(self, overflowed: bool, interval: int) -> None:
        """As `GradScaler.update`, by the same function of torch."""
        scale, good = torch.tensor(self.value), torch.tensor(self.good, dtype=torch.int32)
        amp_update_scale_(scale, good, torch.tensor([float(overflowed)]), GROWTH, BACKOFF, interval)
        self.value, self.good = float(scale), int(good)
        self.skipped += overflowed
        self.in_row = self.in_row + 1 if overflowed else 0


class LossScaler(NoteField):
    """Unscales one worker's gradients, and skips an update if any worker's gradients overflowed.

    Args:
        initial: the first scale.
        interval: the scale doubles after this many good updates.

    Attributes:
        scale: of the next minibatch.
        last: how the last minibatch's loss was scaled; None before the first.
        skips: whether the update that `apply` was called for is skipped.
    """

    up = down = 1

    def __init__(self, initial: float, interval: int, plan: Plan, worker: int) -> None:
        self.scale = Scale(initial)
        self.last: ScaledStep | None = None
        self.skips = False
        self.worker = worker
        self._interval = interval
        self._divisor = plan.loss_divisor
        self._found = 0.0
        self._places: list[int] = []

    def add(self, of_shape: Plan) -> None:
        """Add a shape of batch."""
        self._places.append([leaf.name for leaf in of_shape.batch].index(LOSS_SCALE))

    def leaves(self, given: Sequence[Any], shape: int, device: torch.device) -> Sequence[Any]:
        """The leaves of a microbatch, including the present scale.

        The scale is divided here, not the sum of the microbatches' gradients: so no gradient is larger than in the
        backward of the whole batch, and their sum is the gradient of the scaled loss.
        """
        made = list(given)
        made[self._places[shape]] = torch.full((), self.scale.value / self._divisor, device=device)
        return made

    def state(self) -> Any:
        return {"loss_scale": dict(vars(self.scale)), "clip": None}  # with a flush, clipping has no state

    def load(self, state: Any, same: bool) -> None:
        if isinstance(state, Mapping):  # else from a build without loss scaling
            self.scale = Scale(**state["loss_scale"])

    def measure(self, minibatch: int, parameters: Sequence[nn.Parameter]) -> None:
        self._found = unscale([p.grad for p in parameters if p.grad is not None], self.scale.value)

    def pass_up(self, behind: Tensor) -> Tensor:
        self._found = max(self._found, float(behind))
        return torch.tensor([self._found], dtype=torch.float64)

    def pass_down(self, before: Tensor) -> Tensor:
        if self.worker > 0:
            self._found = float(before)
        return torch.tensor([self._found], dtype=torch.float64)

    def apply(self, minibatch: int, parameters: Sequence[nn.Parameter]) -> None:
        """Set `skips`, and unscale the gradients.

        Raises:
            NotFiniteError: gradients overflowed at every scale down to the smallest.
        """
        self.skips = self._found > 0
        self.last = ScaledStep(self.scale.value, self.skips)
        self.scale.update(self.skips, self._interval)
        if self.skips and self.scale.value < LEAST:
            raise _overflows(minibatch, self.scale, self.last.scale)


def unscale(gradients: Sequence[Tensor], scale: float) -> float:
    """Divide gradients by the scale, in place, as GradScaler does; 1 if one of them is infinite or NaN, else 0."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        kinds.setdefault((real.device, real.dtype), []).append(real)
    found = 0.0
    for (device, _), alike in kinds.items():
        inverse = torch.full((), scale, device=device).double().reciprocal().float()
        flag = torch.zeros(1, device=device)
        unscale_and_check_(alike, flag, inverse)
        found = max(found, float(flag))
    return found


def _overflows(minibatch: int, scale: Scale, used: float) -> NotFiniteError:
    return NotFiniteError(
        f"the gradients of step {minibatch + 1} overflow float16 even at a loss scale of {used:g}: {scale.in_row} "
        "steps in a row made no update",
        hint="an unscaled gradient is infinite, NaN or beyond 65504: look at that batch, lower the learning rate, "
        "clip gradients (--clip-norm), use a mean instead of a sum as the loss; or compile with --autocast bf16",
        page="not-finite",
    )


def make_scaler(options: PipelineOptions, plan: Plan, worker: int, recipe: Recipe) -> LossScaler | None:
    """The loss scaler of one worker, if the build scales its loss; else None.

    Raises:
        ScheduleError: the schedule has no flush.
        RunError: the options are invalid.
    """
    check_loss_scaling(recipe.schedule, plan.autocast)
    if not plan.scales_loss:
        return None
    initial, interval = options.loss_scale, options.loss_scale_interval
    if not (math.isfinite(initial) and initial > 0 and interval > 0):
        raise RunError(
            f"a loss scale of {initial:g}, doubled after {interval} steps, makes no sense",
            hint="give a finite loss_scale above 0, and a loss_scale_interval above 0",
        )
    return LossScaler(initial, interval, plan, worker)
