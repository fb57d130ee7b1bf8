"""How well three kinds of cuts would balance the workers, and how well the build's own do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.planner.candidates import MODES
from fxpipe.planner.partition import Partition, of_cuts, partitions
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Workers
from fxpipe.policy.recipe import Recipe

BUDGET = 1_000_000
"""Pairs of cuts that may be looked at to prove that a partition is the best: about a second's work."""

ROUNDS = 6
"""Rounds of improvement if nothing is proved; fewer for more workers, because each round takes longer."""

PINNED = "pinned"


@dataclass(frozen=True)
class CutsComparison:
    """The build's own cuts compared with the best of each kind.

    Attributes:
        efficiency: how much of the ideal the build's own cuts reach; None if its policy is the model file's own.
        rows: a row for each kind of cuts. The row of the build's own cuts is `chosen`: one of these, or an extra row
            after them.
    """

    efficiency: float | None = None
    rows: tuple[dict[str, Any], ...] = ()


def balance_of(subject: Subject, recipe: Recipe | None, compare: bool = True) -> CutsComparison:
    """Compare the build's own cuts with the best of each kind, under a schedule and a policy.

    What the compile compared is taken from its results. The rest is planned without limits of memory. The build's own
    cuts are priced again, as a row of their own, if they were planned for another schedule or policy, or given by hand.

    Args:
        compare: whether to plan the cuts that the build does not have, which takes seconds for many workers; without
            it there are no rows.
    """
    plan, compared = subject.plan, subject.costs.partitions
    planned_for = recipe is None or (recipe.schedule.name, str(recipe.policy)) == (plan.schedule, plan.policy)
    chosen = compared[-1] if compared and planned_for else None
    if recipe is None:
        return CutsComparison(None if chosen is None else chosen.efficiency)
    if chosen is not None and not compare:
        return CutsComparison(chosen.efficiency)
    workers = _workers(subject, recipe)
    found = {p.mode: p for p in compared} if planned_for else {}
    if compare and any(mode not in found for mode in MODES):
        large = 1 + plan.workers // 16
        best = partitions(subject.profile, workers, MODES, budget=BUDGET // large, rounds=max(1, ROUNDS // large))
        found = _widened({**best, **found})
    if chosen is None:
        chosen = found[PINNED] = _own(subject, workers)
    rows = tuple(_row(found[mode], mode == chosen.mode) for mode in (*MODES, PINNED) if mode in found)
    return CutsComparison(chosen.efficiency, rows if compare else ())


def _widened(found: dict[str, Partition]) -> dict[str, Partition]:
    """Each made no worse than the narrower ones: it includes their cuts, even if a short search missed them."""
    best: Partition | None = None
    result = {}
    for mode in MODES:
        own = found[mode]
        if best is not None and best.bottleneck < own.bottleneck:
            bound = min(own.lower_bound, best.bottleneck)
            own = dataclasses.replace(best, mode=mode, lower_bound=bound)
        best = result[mode] = own
    return result


def _workers(subject: Subject, recipe: Recipe) -> Workers:
    setting = Setting(
        recipe.schedule.name,
        str(recipe.policy),
        subject.plan.own_microbatches,
        subject.costs.links,
        subject.costs.speeds,
        optimizer_bytes=subject.costs.optimizer_bytes,
        policy_times=subject.costs.policy_times,
        placement=subject.plan.placement,
        replicas=subject.plan.replicas if subject.plan.crossing else (),
        rows=subject.plan.rows if recipe.schedule.name == subject.plan.schedule else (),
        dp=subject.plan.dp,
    )
    return setting.workers(subject.plan.workers)


def _own(subject: Subject, workers: Workers) -> Partition:
    """What the build's own cuts cost."""
    plan, compared = subject.plan, subject.costs.partitions
    forward, backward, weights = ([s[0] for s in spans] + [len(plan.units)] for spans in _spans(subject))
    again = compared[-1].recompute if compared else ()
    return of_cuts(subject.profile, workers, forward, backward, weights, recompute=again, mode=PINNED)


def _spans(subject: Subject) -> list[list[tuple[int, int]]]:
    stages = subject.plan.stages
    return [[s.forward_units for s in stages], [s.backward_units for s in stages], [s.weight_units for s in stages]]


def _row(partition: Partition, chosen: bool) -> dict[str, Any]:
    return {
        "mode": partition.mode,
        "chosen": chosen,
        "efficiency": partition.efficiency,
        "exact": None if partition.mode == PINNED else partition.exact,
        "bottleneck_ms": 1e3 * partition.bottleneck,
        "ideal_ms": 1e3 * partition.ideal,
        "workers": [
            {
                "forward_ms": 1e3 * load.forward,
                "backward_ms": 1e3 * load.backward,
                "weight_ms": 1e3 * load.weight,
                "update_ms": 1e3 * load.update,
                "recompute_ms": 1e3 * load.recompute,
                "exposed_ms": 1e3 * load.exposed,
                "total_ms": 1e3 * load.total,
                "memory_bytes": load.memory,
            }
            for load in partition.loads
        ],
    }
