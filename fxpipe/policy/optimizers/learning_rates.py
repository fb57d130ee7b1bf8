"""The learning rates of future updates, for schedules that depend only on the number of updates."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class LearningRates:
    """The rates that a scheduler will set, found by a copy of it that runs ahead, the scout.

    The scout is a deep copy that acts on a shell of the optimizer: the same type and options, but no parameters and no
    state. So callables that have state are copied too, and nothing that the real scheduler uses changes. Each rate is
    computed once; this needs only the memory of some floats.

        scheduler = make_scheduler(optimizer)
        rates = LearningRates(optimizer, scheduler)
        ...
        optimizer.step(); scheduler.step(); rates.stepped()
        rates.reach(0, 3)                           # the rates of group 0 in the next three updates

    It is not an error if the rates are not known ahead: ReduceLROnPlateau waits for a metric; a scheduler that is not
    an LRScheduler of torch may do anything in its steps; some cannot be copied. After the end of a schedule its last
    rate applies. If the live rate ever differs from the scout's (other code sets it, or it is drawn at random), the
    scout is dropped.

    Args:
        optimizer, scheduler: as they are after so many updates.
        updates: made so far.
        due: whether the scheduler makes a step after so many updates; by default after each.

    Attributes:
        known: the scout runs ahead.

    From: FTPipe's scheduler-aware prediction (Eliad et al. 2021).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        updates: int = 0,
        due: Callable[[int], bool] = lambda updates: True,
    ) -> None:
        self.optimizer = optimizer
        self._due = due
        self._foreseen = updates
        self.known = False
        self._shell = _shell(optimizer)
        self._scout: LRScheduler | None = None
        self._rates: deque[list[float]] = deque()  # of each group: now, after one more update, …
        foretells = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
        if self._shell is None or not foretells:
            return
        try:
            self._scout = copy.deepcopy(scheduler, {id(optimizer): self._shell})
            self._rates.append(_rates(self._shell))
        except Exception:  # it works for the real optimizer: we just cannot copy it
            return
        self.known = True

    def stepped(self) -> None:
        """Call after every update, and after the real scheduler's step where there is one."""
        if not self.known:
            return
        self._look(2)
        self._rates.popleft()
        live = _rates(self.optimizer)
        # Not exactly, because a rate may be a tensor on another device.
        if not all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(self._rates[0], live, strict=True)):
            self.known = False

    def reach(self, group: int, steps: int) -> list[float] | None:
        """The rates of parameter group `group` in the next `steps` updates; None if they are not known."""
        if not self.known:
            return None
        self._look(steps)
        if not math.isclose(self._rates[0][group], float(self.optimizer.param_groups[group]["lr"]), rel_tol=1e-6):
            return None
        return [self._rates[ahead][group] for ahead in range(steps)]

    def _look(self, steps: int) -> None:
        """Run the scout until it has the rates of that many updates."""
        assert self._shell is not None
        while len(self._rates) < steps:
            self._foreseen += 1
            if self._scout is not None and self._due(self._foreseen):
                try:
                    with torch.random.fork_rng(devices=[]):
                        self._scout.step()
                    self._rates.append(_rates(self._shell))
                    continue
                except Exception:  # OneCycleLR past its last step: the schedule has ended
                    self._scout = None
            self._rates.append(self._rates[-1])


def rate_of(group: Mapping[str, Any]) -> float | None:
    """The learning rate of a parameter group; None where it has none, or the optimizer finds its own at every step."""
    rate = group.get("lr")
    return None if rate is None else float(rate)


def _shell(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """An optimizer of the same type and options without parameters; None if its type does not allow it.

    `copy.copy` does not work here: it would run the type's loading of a state, on the real groups.
    """
    if hasattr(type(optimizer), "param_groups"):  # a property: setting it might reach the real groups
        return None
    shell = object.__new__(type(optimizer))
    shell.__dict__.update(
        optimizer.__dict__,
        defaults=dict(optimizer.defaults),
        state={},
        param_groups=[{**_options(group), "params": []} for group in optimizer.param_groups],
        _opt_called=True,  # else torch warns of a scheduler that is stepped before its optimizer
    )
    return shell


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options; numbers that a scheduler would change in place are copied."""
    own = {key: value for key, value in group.items() if key != "params"}
    for key, value in own.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            own[key] = value.detach().clone()
    return own


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
