"""The units, in order: where each runs, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.plan import Plan


def unit_rows(subject: Subject) -> list[dict[str, Any]]:
    """A row a unit; times are None for a build of an earlier fxpipe."""
    units = subject.profile.units if subject.profile else (None,) * len(subject.plan.units)
    return [
        {
            "module": path,
            "forward": forward,
            "backward": backward,
            "weights": weights,
            "forward_ms": unit and unit.forward_ms,
            "backward_ms": unit and unit.backward_ms,
            "weight_ms": unit and unit.weight_ms,
        }
        for path, (forward, backward, weights), unit in zip(
            subject.plan.units, workers_of_units(subject.plan), units, strict=True
        )
    ]


def workers_of_units(plan: Plan) -> list[tuple[int, int, int]]:
    """Each unit's workers of F, B and W."""
    kinds = ("forward_units", "backward_units", "weight_units")
    return list(zip(*(_spread(plan, kind) for kind in kinds), strict=True))


def _spread(plan: Plan, kind: str) -> Iterator[int]:
    for worker, stage in enumerate(plan.stages):
        first, end = getattr(stage, kind)
        yield from (worker for _ in range(first, end))
