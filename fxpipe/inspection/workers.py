"""The workers: what each runs, owns, receives and holds."""

from __future__ import annotations

from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.passes.analysis.summary import Traffic, begin
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.quantity import size
from fxpipe.policy.recipe import Recipe
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.check import held
from fxpipe.simulator.memory import peak_bytes


def worker_rows(subject: Subject, recipe: Recipe | None = None, traffic: Traffic | None = None) -> list[dict[str, Any]]:
    """A row for each worker.

    Args:
        recipe: how the build is run, which decides what is in flight; None means as it was compiled.
        traffic: of that recipe.
    """
    schedule = None if recipe is None else recipe.schedule
    memory = [worker.memory_bytes for worker in subject.costs.workers]
    if recipe is not None:
        memory = list(peak_bytes(subject.plan, subject.costs, recipe.demand))
    return [_row(subject, rank, schedule, traffic, memory[rank]) for rank in range(subject.plan.workers)]


def speed_of(subject: Subject, rank: int) -> float:
    """A worker's speed; 1 is the device that the costs are of."""
    return subject.costs.speeds[subject.plan.rank_of(rank)] if subject.costs.speeds else 1.0


def again_text(costs: BuildCosts) -> str:
    """One line: what backwards compute again to save memory; '' if that is nothing."""
    found = [
        f"worker {row.rank} {1e3 * row.again:.2f} ms, which saves {size(row.spared_bytes)}"
        for row in costs.workers
        if row.again or row.spared_bytes
    ]
    return f"computed again, a microbatch: {'; '.join(found)}" if found else ""


def _row(
    subject: Subject, rank: int, schedule: Schedule | None, traffic: Traffic | None, memory: int
) -> dict[str, Any]:
    plan = subject.plan
    stage = plan.stages[rank]
    owned = plan.owned(rank)
    copies = [p for p in plan.parameters if p.owner != rank and any(w == rank for w, _ in p.readers)]
    owned_bytes, copy_bytes = (sum(p.tensor.bytes for p in rows) for rows in (owned, copies))
    costs = subject.costs.workers[rank]
    copy_bytes = copy_bytes + traffic.bases[rank] if traffic else costs.copy_bytes
    flight = costs.in_flight if schedule is None else held(schedule)[rank]
    forward, backward, update, weight = _spent(subject, rank)
    return {
        "worker": rank,
        "rank": plan.rank_of(rank),
        "speed": speed_of(subject, rank),
        "forward_from": begin(plan, stage.forward_units),
        "backward_from": begin(plan, stage.backward_units),
        "forward_units": list(stage.forward_units),
        "backward_units": list(stage.backward_units),
        "weight_units": list(stage.weight_units),
        "forward_ms": forward,
        "backward_ms": backward,
        "weight_ms": weight,
        "update_ms": update,
        "owned": len(owned),
        "owned_bytes": owned_bytes,
        "copies": len(copies),
        "copy_bytes": copy_bytes,
        "bytes_in": traffic.arriving[rank] if traffic else costs.bytes_in,
        "bytes_out": traffic.leaving[rank] if traffic else costs.bytes_out,
        "saved_bytes": costs.saved_bytes,
        "deferred_bytes": costs.deferred_bytes,
        "in_flight": flight,
        "again": len(stage.again),
        "again_ms": 1e3 * costs.again,
        "spared_bytes": costs.spared_bytes,
        "memory_bytes": memory,
        "engines": list(stage.engines),
        "buckets": [
            {"name": b.name, "bytes": b.bytes, "parameters": list(b.parameters), "updaters": list(b.updaters)}
            for b in stage.buckets
        ],
        "owned_names": [p.name for p in owned],
        "copy_names": [p.name for p in copies],
        "file": stage.file,
        "edited": stage.file in subject.edited,
    }


def _spent(subject: Subject, rank: int) -> tuple[float | None, ...]:
    """Milliseconds of F, B with W, the update, and W alone if it is separate, as the simulator has them."""
    time = subject.costs.time(rank)
    weight = time.weight if subject.plan.weights_apart else None
    spent = (time.forward, time.backward + time.weight, time.update, weight)
    return tuple(None if seconds is None else 1e3 * seconds / speed_of(subject, rank) for seconds in spent)
