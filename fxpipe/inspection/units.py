"""The units, in order: where each runs, whether it is cut apart, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.plan.spec import Plan

WIRES = ("send", "recv", "all_reduce", "reduce_scatter")
"""Operators of nodes that compute nothing: an idle worker has some too, since it passes on what keeps the order."""


def unit_rows(subject: Subject) -> list[dict[str, Any]]:
    """A row for each unit."""
    return [
        {
            "module": path,
            "forward": forward,
            "backward": backward,
            "weights": weights,
            "forward_ms": unit.forward_ms,
            "backward_ms": unit.backward_ms,
            "weight_ms": unit.weight_ms,
            "apart": apart,
        }
        for path, (forward, backward, weights), unit, apart in zip(
            subject.plan.units, workers_of_units(subject.plan), subject.profile.units, units_apart(subject), strict=True
        )
    ]


def units_apart(subject: Subject) -> list[bool]:
    """For each unit whether its forward, its backward and its weight gradients are not all on one worker.

    A kind of which the unit has no nodes does not count, nor does what other workers compute again.
    """
    homes = workers_of_units(subject.plan)
    places: list[set[int]] = [set() for _ in homes]
    for node in subject.nodes.rows:
        if node.phase is None or node.op in WIRES or node.unit is None or not 0 <= node.unit < len(homes):
            continue
        kind = 2 if node.weight else 0 if node.phase == "F" else 1
        if node.worker == homes[node.unit][kind]:
            places[node.unit].add(node.worker)
    return [len(workers) > 1 for workers in places]


def workers_of_units(plan: Plan) -> list[tuple[int, int, int]]:
    """Each unit's workers of F, B and W."""
    kinds = ("forward_units", "backward_units", "weight_units")
    return list(zip(*(_spread(plan, kind) for kind in kinds), strict=True))


def _spread(plan: Plan, kind: str) -> Iterator[int]:
    for worker, stage in enumerate(plan.stages):
        first, end = getattr(stage, kind)
        yield from (worker for _ in range(first, end))
