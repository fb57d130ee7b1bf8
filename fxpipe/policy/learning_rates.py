"""The learning rates of updates to come, for schedules that depend on nothing but their count."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

MakeScheduler = Callable[[torch.optim.Optimizer], Any]


class LearningRates:
    """The rates that the scheduler will set, found by a second scheduler, the scout, that runs ahead of it.

    The scout is built by the user's own function, on a shell of the optimizer: the same type and options, but no
    parameters and no state. Each rate is computed once; there is no other memory than some floats.

        rates = LearningRates(optimizer)            # before any scheduler has changed the optimizer's options
        scheduler = make_scheduler(optimizer)
        rates.follow(make_scheduler)
        ...
        optimizer.step(); scheduler.step(); rates.stepped()
        rates.reach(0, 3)                           # the rates of group 0 in the next three updates

    A schedule that needs more than to be stepped (ReduceLROnPlateau waits for a metric), or that cannot be built
    twice, is not known ahead: that is no error. Past the end of a schedule its last rate stands. Whoever changes the
    live rates otherwise is noticed, since the scout's rate then differs: no rates are told while it does.

    `make_scheduler` must build a scheduler that acts on nothing but the optimizer it is given; a function that
    serves several workers must so in any case.

    Args:
        optimizer: as it is before it has a scheduler.

    Attributes:
        known: the schedule runs ahead.

    From: FTPipe's scheduler-aware prediction (Eliad et al. 2021).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.known = False
        self._shell = _shell(optimizer)
        self._scout: Any = None
        self._rates: deque[list[float]] = deque()  # of each group: now, after one more update, …

    def follow(self, make_scheduler: MakeScheduler | None) -> None:
        """Build the scout, after the real scheduler. Without one (None, or it makes None) the rates stand still."""
        if self._shell is None:
            return
        try:
            self._scout = make_scheduler(self._shell) if make_scheduler else None
            self._rates = deque([_rates(self._shell)])
        except Exception:  # it worked for the real optimizer: what a shell lacks is our affair
            return
        self.known = self._is_apart()
        if self.known:
            self._look(2)  # a scout that cannot be stepped shows it here

    def resume(self, scheduler: Any) -> None:
        """The real optimizer and scheduler have loaded a state: go on from there."""
        if not self.known or self._shell is None:
            return
        try:
            for mine, live in zip(self._shell.param_groups, self.optimizer.param_groups, strict=True):
                mine.update(_options(live))
            if self._scout is not None:
                self._scout.load_state_dict(copy.deepcopy(scheduler.state_dict()))
            self._rates = deque([_rates(self._shell)])
        except Exception:
            self.known = False

    def stepped(self) -> None:
        """The real scheduler has been stepped: call after each of its steps, that is after every update."""
        if self.known:
            self._look(2)
            self._rates.popleft()

    def reach(self, group: int, steps: int) -> list[float] | None:
        """The rates of parameter group `group` in the next `steps` updates; None where they are not known."""
        if not self.known:
            return None
        self._look(steps)
        live = self.optimizer.param_groups
        if not self.known or group >= len(self._rates[0]):
            return None
        # Not exactly, since a rate may be a tensor that lies elsewhere.
        if not math.isclose(self._rates[0][group], float(live[group]["lr"]), rel_tol=1e-6):
            return None
        return [self._rates[ahead][group] for ahead in range(steps)]

    def _look(self, steps: int) -> None:
        """Run the scout until the rates of so many updates are there."""
        while len(self._rates) < steps:
            if self._scout is not None and self._shell is not None:
                try:
                    self._scout.step()
                    self._rates.append(_rates(self._shell))
                    continue
                except TypeError:  # its step() wants arguments that only the training can give
                    self.known = False
                except Exception:  # OneCycleLR past its last step: the schedule has ended
                    pass
                self._scout = None
            self._rates.append(self._rates[-1])

    def _is_apart(self) -> bool:
        """The scout acts on the shell: its function did not take the real optimizer from elsewhere."""
        held = list(getattr(self._scout, "__dict__", {}).values())
        held += [getattr(inner, "optimizer", None) for inner in getattr(self._scout, "_schedulers", [])]
        return not any(value is self.optimizer for value in held)


def _shell(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """An optimizer of the same type and options that holds nothing; None where its type does not allow it.

    Not by `copy.copy`: it would run what a type does when it loads a state, on the real groups.
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
    shell.__dict__.pop("step", None)  # a scheduler that is already there has bound it to the real optimizer
    return shell


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options; those numbers that a scheduler would write in place are copied."""
    own = {key: value for key, value in group.items() if key != "params"}
    for key, value in own.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            own[key] = value.detach().clone()
    return own


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
