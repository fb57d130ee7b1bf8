"""The workers: what each runs, owns, receives, holds."""

from __future__ import annotations

from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.plan import Plan
from fxpipe.program import unit_name


def worker_rows(subject: Subject) -> list[dict[str, Any]]:
    """A row a worker. What only `costs.json` knows is None without it."""
    return [_row(subject, rank) for rank in range(subject.plan.workers)]


def _row(subject: Subject, rank: int) -> dict[str, Any]:
    plan = subject.plan
    stage = plan.stages[rank]
    owned = plan.owned(rank)
    copies = [p for p in plan.parameters if p.owner != rank and any(w == rank for w, _ in p.readers)]
    costs = subject.workers[rank] if subject.workers else None
    time = subject.times[rank] if subject.times else None
    spent: list[float | None] = [None, None, None]
    if time is not None:
        spent = [1e3 * time.forward, 1e3 * time.backward, 1e3 * time.update]
    elif costs is not None:
        spent = [costs.forward_ms, costs.backward_ms + costs.weight_ms, costs.update_ms]
    return {
        "worker": rank,
        "forward_from": _begin(plan, stage.forward_units),
        "backward_from": _begin(plan, stage.backward_units),
        "forward_units": list(stage.forward_units),
        "backward_units": list(stage.backward_units),
        "weight_units": list(stage.weight_units),
        "forward_ms": spent[0],
        "backward_ms": spent[1],
        "update_ms": spent[2],
        "owned": len(owned),
        "owned_bytes": sum(p.tensor.bytes for p in owned),
        "replicas": len(copies),
        "replica_bytes": sum(p.tensor.bytes for p in copies),
        "bytes_in": costs and costs.bytes_in,
        "bytes_out": costs and costs.bytes_out,
        "saved_bytes": costs and costs.saved_bytes,
        "in_flight": costs and costs.in_flight,
        "memory_bytes": costs and costs.memory_bytes,
        "engines": list(stage.engines),
        "owned_names": [p.name for p in owned],
        "replica_names": [p.name for p in copies],
        "file": stage.file,
        "edited": stage.file in subject.edited,
    }


def _begin(plan: Plan, units: tuple[int, int]) -> str:
    return unit_name(plan.units[units[0]]) if units[0] < units[1] else "nothing"
