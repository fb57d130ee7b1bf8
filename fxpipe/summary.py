"""What each worker of a program does, in numbers: the table that `compile` prints and `costs.json` keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxpipe.aten import viewed
from fxpipe.plan import PartSpec, Plan
from fxpipe.program import Program, info, size_of, unit_name
from fxpipe.runtime.demand import Demand


@dataclass(frozen=True)
class WorkerSummary:
    """One worker. Times are milliseconds a microbatch, as `cost` has them.

    Attributes:
        backward_ms: without what makes weight gradients alone: that is `weight_ms`, of the units `weight_units`.
        update_ms: of one minibatch.
        begins: the module paths where its forward and its backward begin.
        bytes_in, bytes_out: a minibatch's: every edge once for each microbatch, replicas of weights once.
        owned_bytes, replica_bytes: of parameters: mastered here; copies that other workers feed, or frozen.
        saved_bytes: what forward keeps for backward, once for each microbatch in flight.
        memory_bytes: weights, their gradients, replicas, and the saved values of all microbatches in flight. What the
            optimizer keeps, temporaries and message buffers come on top.
    """

    rank: int
    forward_units: tuple[int, int]
    backward_units: tuple[int, int]
    weight_units: tuple[int, int]
    begins: tuple[str, str]
    forward_ms: float
    backward_ms: float
    weight_ms: float
    update_ms: float
    owned: int
    owned_bytes: int
    replicas: int
    replica_bytes: int
    bytes_in: int
    bytes_out: int
    saved_bytes: int
    in_flight: int
    memory_bytes: int

    @staticmethod
    def from_row(row: dict[str, Any]) -> WorkerSummary:
        """Read `dataclasses.asdict`'s row back from JSON, which has lists for tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in row.items()
        }
        return WorkerSummary(**fields)


def summarize(
    program: Program, plan: Plan, in_flight: tuple[int, ...], demand: Demand, update_seconds_per_byte: float = 0.0
) -> list[WorkerSummary]:
    """The table's rows, for a program that has been through every pass.

    Args:
        in_flight: microbatches that each worker holds at most, from the schedule's check.
        demand: who reads which weights, for the bytes of replicas.
        update_seconds_per_byte: of the optimizer, for each byte of a trained parameter.
    """
    seconds: dict[tuple[int, str], float] = {}
    for node in program:
        record = info(node)
        key = (record.worker or 0, "W" if record.weight else record.phase)
        seconds[key] = seconds.get(key, 0.0) + (record.seconds or 0.0)
    sizes = {p.name: p.tensor.bytes for p in plan.parameters}
    traffic = Traffic(plan, demand)
    rows = []
    for rank, stage in enumerate(plan.stages):
        owned = [p.name for p in plan.owned(rank)]
        copies = [p.name for p in plan.parameters if p.owner != rank and any(w == rank for w, _ in p.readers)]
        trained = sum(p.tensor.bytes for p in plan.owned(rank) if p.trained)
        owned_bytes, replica_bytes = (sum(sizes[n] for n in names) for names in (owned, copies))
        saved = _saved_bytes(program, rank)
        rows.append(
            WorkerSummary(
                rank=rank,
                forward_units=stage.forward_units,
                backward_units=stage.backward_units,
                weight_units=stage.weight_units,
                begins=(begin(plan, stage.forward_units), begin(plan, stage.backward_units)),
                forward_ms=seconds.get((rank, "F"), 0.0) * 1e3,
                backward_ms=seconds.get((rank, "B"), 0.0) * 1e3,
                weight_ms=seconds.get((rank, "W"), 0.0) * 1e3,
                update_ms=1e3 * update_seconds_per_byte * trained,
                owned=len(owned),
                owned_bytes=owned_bytes,
                replicas=len(copies),
                replica_bytes=replica_bytes,
                bytes_in=traffic.arriving[rank],
                bytes_out=traffic.leaving[rank],
                saved_bytes=saved,
                in_flight=in_flight[rank],
                memory_bytes=held_bytes(owned_bytes, replica_bytes, saved, in_flight[rank]),
            )
        )
    return rows


def held_bytes(owned: int, replicas: int, saved: int, in_flight: int) -> int:
    """`WorkerSummary.memory_bytes`, from the bytes of its parts: owned weights have gradients, too."""
    return 2 * owned + replicas + saved * in_flight


class Traffic:
    """Bytes that every worker receives and sends for one minibatch, in the steady state.

    Attributes:
        arriving, leaving: by worker.
        weights: what an owner sends a reader after an update, by (owner, reader).
    """

    def __init__(self, plan: Plan, demand: Demand) -> None:
        sizes = {p.name: p.tensor.bytes for p in plan.parameters}
        self.arriving = [0] * plan.workers
        self.leaving = [0] * plan.workers
        self.weights: dict[tuple[int, int], int] = {}
        for edge in plan.edges:
            self._add(edge.src, edge.dst, edge.tensor.bytes * plan.microbatches)
        steady = 4 * plan.workers  # a version that no warm-up reads
        for owner in range(plan.workers):
            for reader in demand.readers(owner):
                messages = demand.messages(owner, reader, steady, 0, None)
                sent = sum(sizes[name] for message in messages for name in message.names)
                self.weights[owner, reader] = sent
                self._add(owner, reader, sent)

    def _add(self, source: int, target: int, count: int) -> None:
        self.leaving[source] += count
        self.arriving[target] += count


def begin(plan: Plan, bounds: tuple[int, int]) -> str:
    """The module in which a span of units begins."""
    return unit_name(plan.units[bounds[0]]) if bounds[0] < bounds[1] else "nothing"


def _saved_bytes(program: Program, rank: int) -> int:
    """Bytes that forward keeps: views of one value count once, the batch's own tensors too."""
    backward = program.stages[rank].backward
    saved: PartSpec = backward.spec
    nodes = list(backward.graph.nodes)[len(saved.weights) + len(saved.buffers) :][: len(saved.saved)]
    by_name = {n.name: n for n in program.graph.nodes}
    roots = {viewed(by_name.get(node.name, node)) for node in nodes}
    return sum(size_of(root.meta["val"]) for root in roots)
