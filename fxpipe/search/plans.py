"""The planner's plans for candidates; candidates that are equal to the planner share a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from fxpipe.errors import CutError
from fxpipe.planner.cost_model import CostModel
from fxpipe.planner.partition import Partition, TooLittleMemory, of_cuts, partitions
from fxpipe.planner.profile import Profile
from fxpipe.planner.workers import Workers

ByMode = dict[str, Partition]
"""The partitions of several modes; a mode that does not fit is missing."""


@dataclass
class Plans:
    """Plans of `partitions`, kept for the next call."""

    say: Callable[[str], None] = lambda text: None
    _kept: list[tuple[Profile, Workers, tuple[str, ...], ByMode | TooLittleMemory]] = field(default_factory=list)

    def of(self, profile: Profile, workers: Workers, modes: tuple[str, ...]) -> ByMode:
        """The best partition of each mode that fits.

        Schedules with a flush differ only in memory. If one worker could hold everything, memory does not matter,
        and they share a plan.

        Raises:
            TooLittleMemory: nothing fits.
            CutError: more workers than units.
        """
        if workers.count > len(profile.units):
            what = f"{workers.count} workers, but the step has only {len(profile.units)} units to share"
            raise CutError(what, hint=f"use -n {len(profile.units)} or fewer")
        if not _roomy(profile, workers):
            return self._planned(profile, workers, modes)
        plans = self._planned(profile, _without_memory(workers), modes)
        return {m: replace(plan, loads=of_cuts(profile, workers, plan.cuts).loads) for m, plan in plans.items()}

    def _planned(self, profile: Profile, workers: Workers, modes: tuple[str, ...]) -> ByMode:
        for kept, before, wider, kept_plans in self._kept:
            if kept is profile and before == workers and set(modes) <= set(wider):  # planned on the way to wider modes
                if isinstance(kept_plans, TooLittleMemory) and modes == wider:
                    raise kept_plans
                if isinstance(kept_plans, dict) and any(mode in kept_plans for mode in modes):
                    return {mode: kept_plans[mode] for mode in modes if mode in kept_plans}
        try:
            plans: ByMode | TooLittleMemory = partitions(profile, workers, modes, self.say)
        except TooLittleMemory as error:
            plans = error
        self._kept.append((profile, workers, modes, plans))
        if isinstance(plans, TooLittleMemory):
            raise plans
        return plans


def _roomy(profile: Profile, workers: Workers) -> bool:
    """Whether every worker could hold everything twice: its own copy, and one that is being sent."""
    costs, count = CostModel(profile, workers), len(profile.units)
    begin, end = np.array([[0, 0, 0, 0]]), np.array([[count, count, count, 0]])
    costs.remember(begin, end)
    most = max(float(costs.memory(k, costs.between(begin, end))[0]) for k in range(workers.count))
    return 2 * most <= min(workers.memory)


def _without_memory(workers: Workers) -> Workers:
    count = workers.count
    return replace(
        workers, memory=(inf,) * count, in_flight=(1,) * count, deferred=(0,) * count, owned_factor=(1.0,) * count
    )
