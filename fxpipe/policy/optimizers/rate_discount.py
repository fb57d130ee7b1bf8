"""Smaller learning rates where gradients are late, until training has calmed down: PipeMare's discount."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fxpipe.errors import PolicyError
from fxpipe.schedule.segments import Segments


class RateDiscount:
    """Divides the rate of a parameter group for a while by how many updates late its gradients are.

        η / τ^(1 − min(t/K, 1))   for update t, from 0

    With τ ≤ 1, from update K on, and in segments of one minibatch, where nothing is late, the rate is the optimizer's
    own. A group has one rate, so τ is the largest of its parameters': they differ only if the cuts of forward and
    backward do. The discounted rate is in the groups during a step only: schedulers never see it.

    From: PipeMare (Yang et al. 2021, MLSys), arXiv 1910.05124.

    Args:
        optimizer: every group has a learning rate `lr`.
        delays: τ of each parameter, by the parameter; 0 if it is missing.
        steps: K.
        segments: of the run.

    Attributes:
        updates: how many have been made.

    Raises:
        PolicyError: a group without a rate.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, delays: Mapping[Tensor, int], steps: int, segments: Segments
    ) -> None:
        self.optimizer = optimizer
        self.steps = steps
        self._segments = segments
        self.updates = 0
        late = {id(parameter): delay for parameter, delay in delays.items()}
        # By number, because loading a state replaces the groups themselves.
        self._late = [
            max((late.get(id(parameter), 0) for parameter in group["params"]), default=0)
            for group in optimizer.param_groups
        ]
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise PolicyError(
                f"{type(optimizer).__name__} finds its own learning rate: there is none to discount",
                hint="leave out --rate-discount, or give the optimizer an lr",
            )

    def factor(self, group: int, update: int) -> float:
        """What the rate of a parameter group is multiplied by in an update, counted from 0."""
        late = self._late[group]
        if late <= 1 or update >= self.steps or self._segments.is_single(update):
            return 1.0
        return float(late ** -(1 - update / self.steps))

    def to_come(self, group: int, updates: int) -> list[float]:
        """The factors of the next updates."""
        return [self.factor(group, self.updates + ahead) for ahead in range(updates)]

    @contextmanager
    def during(self, update: int) -> Iterator[None]:
        """While the update is made, the groups have the discounted rates; what the optimizer itself sets then stays."""
        own = [group["lr"] for group in self.optimizer.param_groups]
        factors = [self.factor(number, update) for number in range(len(own))]
        set_to = [rate if factor == 1 else rate * factor for rate, factor in zip(own, factors, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, set_to, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate, before in zip(self.optimizer.param_groups, set_to, own, strict=True):
                if group["lr"] is rate:
                    group["lr"] = before
        self.updates = update + 1


def check_rate_discount(steps: int | None, synchronous: bool) -> None:
    """Refuse a discount that makes no sense.

    Raises:
        PolicyError: over fewer than one step, or with a schedule under which no gradient is late.
    """
    if steps is None:
        return
    if steps < 1:
        raise PolicyError(f"a rate cannot be discounted over {steps} steps", hint="rate_discount of 1 or more, or None")
    if synchronous:
        raise PolicyError(
            "with a flush after every step no gradient is late: there is no rate to discount",
            hint="leave out --rate-discount, or train with --schedule async",
        )
