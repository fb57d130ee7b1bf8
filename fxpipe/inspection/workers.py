"""The workers: what each runs, owns, receives and holds, what crosses between them, and how well cuts balance them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.passes.analysis.summary import Traffic, begin
from fxpipe.plan.plan import ParameterSpec
from fxpipe.plan.spec import PHASES
from fxpipe.planner.candidates import MODES, PINNED
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.partition import Load, Partition, of_cuts
from fxpipe.planner.quantity import size
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Workers
from fxpipe.policy.recipe import Recipe
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.check import held
from fxpipe.simulator.memory import peak_bytes


def worker_rows(subject: Subject, recipe: Recipe | None = None, traffic: Traffic | None = None) -> list[dict[str, Any]]:
    """A row for each worker, as the build was compiled, or by how it is run, which decides what is in flight."""
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
    texts = [
        f"worker {row.rank} {1e3 * row.again:.2f} ms, which saves {size(row.spared_bytes)}"
        for row in costs.workers
        if row.again or row.spared_bytes
    ]
    return f"computed again, a microbatch: {'; '.join(texts)}" if texts else ""


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


def edge_rows(subject: Subject, traffic: Traffic | None = None) -> list[dict[str, Any]]:
    """A row for each edge of the plan, in its order; then one for each owner of weights and reader of copies.

    Without `traffic`, which knows how many versions of the weights are sent, each weight counts once.
    """
    sends = subject.nodes.sends
    rows = []
    for edge in subject.plan.edges:
        node = subject.nodes.rows[sends[edge.name]] if edge.name in sends else None
        rows.append(
            {
                "name": edge.name,
                "kind": edge.kind,
                "shape": list(edge.tensor.shape),
                "dtype": edge.tensor.dtype,
                "bytes": edge.sent.bytes,
                "codec": edge.codec,
                "plain_bytes": edge.tensor.bytes,
                "src": edge.src,
                "src_phase": edge.src_phase,
                "dst": edge.dst,
                "dst_phase": edge.dst_phase,
                "module": node.module if node and node.module else None,
                "source": node.source if node else None,
                "names": [],
            }
        )
    return [*rows, *_weights(subject, traffic)]


def _weights(subject: Subject, traffic: Traffic | None) -> Iterator[dict[str, Any]]:
    copies: dict[tuple[int, int], dict[str, ParameterSpec]] = {}
    phases: dict[tuple[int, int], set[str]] = {}
    for parameter in subject.plan.parameters:
        for reader, phase in parameter.readers if parameter.trained else ():
            if reader != parameter.owner:
                copies.setdefault((parameter.owner, reader), {})[parameter.name] = parameter
                phases.setdefault((parameter.owner, reader), set()).add(phase)
    for (owner, reader), parameters in sorted(copies.items()):
        once = sum(p.tensor.bytes for p in parameters.values())
        dtypes = {p.tensor.dtype for p in parameters.values()}
        yield {
            "name": f"weights of worker {owner}",
            "kind": "weights",
            "shape": [],
            "dtype": " ".join(sorted(dtypes)),
            "bytes": traffic.weights[owner, reader] if traffic else once,
            "codec": subject.plan.weights_codec,
            "plain_bytes": once,
            "src": owner,
            "src_phase": "update",
            "dst": reader,
            "dst_phase": "".join(phase for phase in PHASES if phase in phases[owner, reader]),
            "module": None,
            "source": None,
            "names": list(parameters),
        }


_TIMES = ("forward", "backward", "weight", "update", "recompute", "exposed", "total")


def balance_rows(subject: Subject, recipe: Recipe | None) -> list[dict[str, Any]]:
    """A row for each mode of cuts that compiling compared; the row of the build's own cuts is `chosen`.

    If the build's cuts were given by hand, or planned for another schedule or policy, they are the only row, and their
    cost is computed here. That needs a recipe: without one there are no rows.
    """
    planned_for = recipe is None or (recipe.schedule.name, str(recipe.policy)) == (
        subject.plan.schedule, subject.plan.policy,
    )  # fmt: skip
    partitions = list(subject.costs.partitions) if planned_for else []
    if not partitions and recipe is not None:
        partitions = [_own_cuts(subject, _planned_for(subject, recipe))]
    return partition_rows(partitions)


def partition_rows(compared: Sequence[Partition]) -> list[dict[str, Any]]:
    """A row for each partition, of which the last one was chosen."""
    order = (*MODES, PINNED)
    return [_partition_row(p, p is compared[-1]) for p in sorted(compared, key=lambda p: order.index(p.mode))]


def _planned_for(subject: Subject, recipe: Recipe) -> Workers:
    setting = Setting(
        recipe.schedule.name,
        str(recipe.policy),
        subject.costs.speeds,
        links=subject.costs.links,
        microbatches=subject.plan.own_microbatches,
        optimizer_bytes=subject.costs.optimizer_bytes,
        policy_times=subject.costs.policy_times,
        placement=subject.plan.placement,
        replicas=subject.plan.replicas if subject.plan.crossing else (),
        rows=subject.plan.rows if recipe.schedule.name == subject.plan.schedule else (),
        dp=subject.plan.dp,
    )
    return setting.workers(subject.plan.workers)


def _own_cuts(subject: Subject, workers: Workers) -> Partition:
    """The cost of the build's own cuts for these workers."""
    plan, compared = subject.plan, subject.costs.partitions
    again = compared[-1].recompute if compared else ()
    return of_cuts(subject.profile, workers, replace(Cuts.of(plan), recompute=again))


def _partition_row(partition: Partition, chosen: bool) -> dict[str, Any]:
    return {
        "mode": partition.mode,
        "chosen": chosen,
        "efficiency": partition.efficiency,
        "exact": None if partition.mode == PINNED else partition.exact,
        "bottleneck_ms": 1e3 * partition.bottleneck,
        "ideal_ms": 1e3 * partition.ideal,
        "moved_bytes": partition.moved,
        "simulated_ms": None if partition.simulated is None else 1e3 * partition.simulated,
        "workers": [load_row(load) for load in partition.loads],
    }


def load_row(load: Load) -> dict[str, float]:
    """What a microbatch costs a worker: milliseconds, and bytes of memory."""
    return {f"{part}_ms": 1e3 * getattr(load, part) for part in _TIMES} | {"memory_bytes": load.memory}
