"""How well three kinds of cuts would balance the workers, and how well the build's own do."""

from __future__ import annotations

import dataclasses
from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.planner.advice import advised_partitions
from fxpipe.planner.candidates import MODES
from fxpipe.planner.partition import Partition, of_cuts
from fxpipe.planner.profile import Profile
from fxpipe.planner.setting import Setting
from fxpipe.runtime.assembly import Recipe

BUDGET = 1_000_000
"""Pairs of cuts that may be looked at to prove a partition the best: what takes a second."""

PINNED = "pinned"


def partition_rows(subject: Subject, recipe: Recipe | None) -> list[dict[str, Any]]:
    """A row for each kind of cuts; one of them, or one more, is what the build has: it is `chosen`.

    What the compile compared is taken from there. The rest is planned without limits of memory, and the build's own
    cuts are priced anew, where the schedule or the policy is not the one that it was planned for.
    """
    if subject.profile is None or recipe is None:
        return []
    plan = subject.plan
    setting = _setting(subject, recipe)
    compared = subject.known.partitions
    same = (setting.schedule, setting.policy) == (plan.schedule, plan.policy)
    mode = compared[-1].mode if compared else PINNED
    found = {p.mode: p for p in compared} if same else {}
    if any(m not in found for m in MODES):
        budget = BUDGET // (1 + plan.workers // 16)
        planned = advised_partitions(subject.profile, setting, plan.workers, MODES, budget=budget)
        found = _widened({**planned, **found})
    if not (same and compared):
        found[mode] = _own(subject, subject.profile, setting, mode)
    return [_row(found[m], m == mode) for m in (*MODES, PINNED) if m in found]


def _widened(found: dict[str, Partition]) -> dict[str, Partition]:
    """Each no worse than the narrower ones: their cuts are among its own, where a short search missed them."""
    best: Partition | None = None
    result = {}
    for mode in MODES:
        own = found[mode]
        if best is not None and best.bottleneck_ms < own.bottleneck_ms:
            bound = min(own.lower_bound_ms, best.bottleneck_ms)
            own = dataclasses.replace(best, mode=mode, lower_bound_ms=bound)
        best = result[mode] = own
    return result


def efficiency(subject: Subject, recipe: Recipe | None) -> float | None:
    """How much of the ideal the build's own cuts reach; None where nobody knows what its units cost."""
    if subject.known.partitions:
        return subject.known.partitions[-1].efficiency
    if subject.profile is None or recipe is None:
        return None
    return _own(subject, subject.profile, _setting(subject, recipe), PINNED).efficiency


def _setting(subject: Subject, recipe: Recipe) -> Setting:
    return Setting(
        recipe.schedule.name,
        str(recipe.policy),
        subject.plan.microbatches,
        subject.links,
        subject.speeds,
        optimizer_bytes=subject.known.optimizer_bytes,
    )


def _own(subject: Subject, profile: Profile, setting: Setting, mode: str) -> Partition:
    """What the build's own cuts cost."""
    plan, compared = subject.plan, subject.known.partitions
    forward, backward, weights = ([s[0] for s in spans] + [len(plan.units)] for spans in _spans(subject))
    again = compared[-1].recompute if compared else ()
    return of_cuts(profile, setting.workers(plan.workers), forward, backward, weights, recompute=again, mode=mode)


def _spans(subject: Subject) -> list[list[tuple[int, int]]]:
    stages = subject.plan.stages
    return [[s.forward_units for s in stages], [s.backward_units for s in stages], [s.weight_units for s in stages]]


def _row(partition: Partition, chosen: bool) -> dict[str, Any]:
    return {
        "mode": partition.mode,
        "chosen": chosen,
        "efficiency": partition.efficiency,
        "exact": partition.exact,
        "bottleneck_ms": partition.bottleneck_ms,
        "ideal_ms": partition.ideal_ms,
        "workers": [
            {
                "forward_ms": load.forward,
                "backward_ms": load.backward,
                "weight_ms": load.weight,
                "update_ms": load.update,
                "recompute_ms": load.recompute,
                "exposed_ms": load.exposed,
                "total_ms": load.total,
                "memory_bytes": load.memory,
            }
            for load in partition.loads
        ],
    }
