"""Finds a scheduler that makes a step after every update and seems to be meant for epochs, as most scripts have it."""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.policy.optimizers.learning_rates import LearningRates

FALL = 1000
"""How many times smaller a rate must become."""

FURTHEST = 10_000
"""The most updates that are looked at."""

ENDS = ("T_max", "total_steps", "total_iters")
"""What torch's schedulers call the number of their steps, where the rate has its way to go in these."""

WHOLE_WAY = ("CosineAnnealingLR", "OneCycleLR", "PolynomialLR")
"""Those whose steps are a whole training's; others, such as a warm-up, have an end of their own."""


def hurried(optimizer: torch.optim.Optimizer, scheduler: Any, updates: int, of: str = "an epoch") -> str | None:
    """Why a scheduler seems to be meant for epochs: a sentence; None if nothing says so.

    It is where the rate falls to a thousandth in the first half of so many updates, or the scheduler's own end comes
    before.

    Args:
        scheduler: makes a step after every update; it has made none yet, and makes none here.
        updates: of an epoch, or of the run if that is shorter.
        of: which of them.
    """
    half = min(updates // 2, FURTHEST)
    cure = 'a step after every epoch is `return scheduler, "epoch"`'
    end = _end(scheduler)
    if end is not None and end <= half:
        return (
            f"lr_scheduler() ends after {end} steps, and makes one after every update, of which there are {updates} in "
            f"{of}; {cure}"
        )
    rates = LearningRates(optimizer, scheduler)
    found = rates.reach(0, half) if half > 1 else None
    if found is None:
        return None
    highest = 0.0
    for update, rate in enumerate(found):
        highest = max(highest, rate)
        if rate < highest / FALL:
            return (
                f"the learning rate falls from {highest:.3g} to {rate:.3g} in the first {update} updates, of "
                f"{updates} in {of}: lr_scheduler() makes a step after every update; {cure}"
            )
    return None


def _end(scheduler: Any) -> int | None:
    if type(scheduler).__name__ not in WHOLE_WAY:
        return None
    found = next((getattr(scheduler, name) for name in ENDS if hasattr(scheduler, name)), None)
    return found if isinstance(found, int) and found > 0 else None
