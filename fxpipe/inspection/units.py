"""The units, in order: where each runs, whether it is cut apart, and what it costs."""

from __future__ import annotations

from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.planner.cuts import Cuts

WIRES = ("send", "recv", "all_reduce", "reduce_scatter")
"""Operators of nodes that compute nothing: an idle worker has some too, since it passes on what keeps the order."""


def unit_rows(subject: Subject) -> list[dict[str, Any]]:
    """A row for each unit."""
    plan, cuts = subject.plan, Cuts.of(subject.plan)
    rows = zip(plan.units, subject.profile.units, units_apart(subject), strict=True)
    return [
        {
            "module": path,
            "forward": cuts.worker("F", i),
            "backward": cuts.worker("B", i),
            "weights": cuts.worker("B", i, weight=True),
            "forward_ms": unit.forward_ms,
            "backward_ms": unit.backward_ms,
            "weight_ms": unit.weight_ms,
            "apart": apart,
        }
        for i, (path, unit, apart) in enumerate(rows)
    ]


def units_apart(subject: Subject) -> list[bool]:
    """For each unit whether its forward, its backward and its weight gradients are not all on one worker.

    A kind of which the unit has no nodes does not count, nor does what other workers compute again.
    """
    cuts = Cuts.of(subject.plan)
    places: list[set[int]] = [set() for _ in subject.plan.units]
    for node in subject.nodes.rows:
        if node.phase is None or node.op in WIRES or node.unit is None or not 0 <= node.unit < len(places):
            continue
        if node.worker == cuts.worker(node.phase, node.unit, node.weight):
            places[node.unit].add(node.worker)
    return [len(workers) > 1 for workers in places]
