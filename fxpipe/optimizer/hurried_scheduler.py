"""Finds a scheduler that is stepped after every update although it seems meant for epochs, as in most scripts."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fxpipe.optimizer.state_outside import state_outside
from fxpipe.random_state import torch_state_kept
from fxpipe.torch_private import STEPPED
from fxpipe.tracing.holders import Advancing
from fxpipe.tracing.hook_state import kept

FALL = 1000
"""A rate falls too fast if it becomes this many times smaller in half an epoch."""

TENTH = 10
"""The same in one epoch, if it falls by one factor repeatedly, and more epochs follow."""

FURTHEST = 10_000
"""The most updates to look at."""

ENDS = ("T_max", "total_steps", "total_iters")
"""What torch's schedulers call the number of steps in which the rate goes its whole way."""

WHOLE_WAY = ("CosineAnnealingLR", "OneCycleLR", "PolynomialLR")
"""Schedulers whose steps span the whole training; others, such as a warm-up, may end before."""


def hurried(
    optimizer: torch.optim.Optimizer, scheduler: Any, updates: int, of: str = "an epoch", more: bool = True
) -> str | None:
    """Why a scheduler seems to be meant for epochs: a sentence; None if nothing says so.

    It does if its own end, or a thousandth of its highest rate, comes in the first half of the updates; or a tenth of
    that rate comes within them, by one factor repeatedly, and more epochs follow.

    Args:
        scheduler: it is stepped after every update; it has made no step yet, and makes none here.
        updates: in an epoch, or in the run if that is shorter.
        of: which of the two.
        more: the run has more epochs.
    """
    half = min(updates // 2, FURTHEST)
    cure = 'for a step after every epoch: `return scheduler, "epoch"`'
    end = _end(scheduler)
    if end is not None and end <= half:
        return (
            f"lr_scheduler() ends after {end} steps, and makes one after every update, of which there are {updates} in "
            f"{of}; {cure}"
        )
    highest, rates = 0.0, _rates(optimizer, scheduler, min(updates, FURTHEST) if more else half)
    steady = more and _fall_steadily(rates)
    for update, rate in enumerate(rates):
        highest = max(highest, rate)
        if rate < highest / TENTH if steady else rate < highest / FALL and update < half:
            return (
                f"the learning rate falls from {highest:.3g} to {rate:.3g} in the first {update} updates, of "
                f"{updates} in {of}: lr_scheduler() makes a step after every update; {cure}"
            )
    return None


def _fall_steadily(rates: list[float]) -> bool:
    """Whether the rates fall from their highest by one factor repeatedly."""
    falling = [rate for rate, _ in itertools.groupby(rates[rates.index(max(rates)) :])] if rates else []
    factors = [after / before for before, after in itertools.pairwise(falling) if before]
    return len(factors) > 1 and max(factors) < 1 and max(factors) - min(factors) < 1e-3


def _rates(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
    """The first group's rates in `count` updates, by a copy of the scheduler; fewer if it cannot be copied, or ends.

    The copy acts on an empty optimizer: the same type and options, but no parameters and no state. It shares functions
        with
    the scheduler: what they change is restored, and if that is impossible, nothing is copied.
    """
    rates: list[float] = []
    predictable = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
    if not predictable or hasattr(type(optimizer), "param_groups"):  # setting a property may reach the real groups
        return rates
    shell = object.__new__(type(optimizer))
    shell.__dict__.update(optimizer.__dict__, defaults=dict(optimizer.defaults), state={}, **STEPPED)
    shell.param_groups = [copy.deepcopy({**group, "params": []}) for group in optimizer.param_groups]
    state = state_outside([optimizer, scheduler])
    if any(isinstance(holder, Advancing) for holder in state.holders):
        return rates
    try:
        scout = copy.deepcopy(scheduler, {id(optimizer): shell})
        with torch_state_kept(), kept(state.holders):
            for _ in range(count):
                rates.append(float(shell.param_groups[0]["lr"]))
                scout.step()
    except Exception:  # it works for the real optimizer
        return rates
    return rates


def _end(scheduler: Any) -> int | None:
    if type(scheduler).__name__ not in WHOLE_WAY:
        return None
    end = next((getattr(scheduler, name) for name in ENDS if hasattr(scheduler, name)), None)
    return end if isinstance(end, int) and end > 0 else None
