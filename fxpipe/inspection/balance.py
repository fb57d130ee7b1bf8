"""How well the build's cuts balance the workers, and the other cuts that compiling compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.planner.candidates import MODES, PINNED
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.partition import Partition, of_cuts
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Workers
from fxpipe.policy.recipe import Recipe

_TIMES = ("forward", "backward", "weight", "update", "recompute", "exposed", "total")


def balance_rows(subject: Subject, recipe: Recipe | None) -> list[dict[str, Any]]:
    """A row for each mode of cuts that compiling compared; the row of the build's own cuts is `chosen`.

    If the build's cuts were given by hand, or planned for another schedule or policy, they are the only row, and their
    cost is computed here. That needs a recipe: without one there are no rows.
    """
    planned_for = recipe is None or (recipe.schedule.name, str(recipe.policy)) == (
        subject.plan.schedule, subject.plan.policy,
    )  # fmt: skip
    found = list(subject.costs.partitions) if planned_for else []
    if not found and recipe is not None:
        found = [_own(subject, _workers(subject, recipe))]
    order = (*MODES, PINNED)
    return [_row(p, p is found[-1]) for p in sorted(found, key=lambda p: order.index(p.mode))]


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
    """The cost of the build's own cuts for these workers."""
    plan, compared = subject.plan, subject.costs.partitions
    again = compared[-1].recompute if compared else ()
    return of_cuts(subject.profile, workers, replace(Cuts.of(plan), recompute=again))


def _row(partition: Partition, chosen: bool) -> dict[str, Any]:
    return {
        "mode": partition.mode,
        "chosen": chosen,
        "efficiency": partition.efficiency,
        "exact": None if partition.mode == PINNED else partition.exact,
        "bottleneck_ms": 1e3 * partition.bottleneck,
        "ideal_ms": 1e3 * partition.ideal,
        "workers": [
            {f"{part}_ms": 1e3 * getattr(load, part) for part in _TIMES} | {"memory_bytes": load.memory}
            for load in partition.loads
        ],
    }
