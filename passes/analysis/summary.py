"""What each worker of a program does, in numbers: the table that `compile` prints and `costs.json` keeps."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.aten import viewed
from fxpipe.ir.program import Program, info, size_of, unit_name
from fxpipe.ir.stage import Part
from fxpipe.passes.analysis.liveness import part_memories
from fxpipe.plan.cost_records import UNKNOWN, OptimizerCosts, WorkerSummary
from fxpipe.plan.plan import Plan
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.policy.copy_messages import CopyMessages, Filling
from fxpipe.policy.demand import Demand
from fxpipe.schedule.check import held
from fxpipe.simulator.memory import largest_share, peak_bytes


def summarize(program: Program, plan: Plan, demand: Demand, optimizer: OptimizerCosts = UNKNOWN) -> list[WorkerSummary]:
    """The table's rows, for a program that has been through every pass.

    Of `demand` it takes who reads which weights, for the bytes of copies, and the schedule, for those of kept values.
    """
    seconds: dict[tuple[int, str], float] = {}
    for node in program:
        record = info(node)
        key = (record.worker or 0, "W" if record.weight else record.phase)
        seconds[key] = seconds.get(key, 0.0) + (record.seconds or 0.0)
    in_flight = held(demand.schedule)
    sizes = {p.name: p.tensor.bytes for p in plan.parameters}
    traffic = Traffic(plan, demand)
    rows = []
    for rank, stage in enumerate(plan.stages):
        owned = [p.name for p in plan.owned(rank)]
        copies = [p.name for p in plan.parameters if p.owner != rank and any(w == rank for w, _ in p.readers)]
        owned_bytes, copy_bytes = (sum(sizes[n] for n in names) for names in (owned, copies))
        copy_bytes += traffic.bases[rank]
        saved = _passed_bytes(program, program.stages[rank].parts["B"])
        apart = program.stages[rank].parts.get("W")
        deferred = None if apart is None else _passed_bytes(program, apart)
        rows.append(
            WorkerSummary(
                rank=rank,
                forward_units=stage.forward_units,
                backward_units=stage.backward_units,
                weight_units=stage.weight_units,
                begins=(begin(plan, stage.forward_units), begin(plan, stage.backward_units)),
                forward=seconds.get((rank, "F"), 0.0),
                backward=seconds.get((rank, "B"), 0.0),
                weight=seconds.get((rank, "W"), 0.0),
                update=optimizer.seconds_per_byte * sum(largest_share(plan, rank)),
                owned=len(owned),
                owned_bytes=owned_bytes,
                copies=len(copies),
                copy_bytes=copy_bytes,
                bytes_in=traffic.arriving[rank],
                bytes_out=traffic.leaving[rank],
                saved_bytes=saved,
                in_flight=in_flight[rank],
                memory_bytes=0,
                deferred_bytes=deferred,
                again=program.again[rank].seconds if program.again else 0.0,
                spared_bytes=program.again[rank].bytes if program.again else 0,
                parts=part_memories(program.stages[rank]),
            )
        )
    costs = BuildCosts(tuple(rows), optimizer_bytes=optimizer.state_bytes, step_memory=optimizer.step)
    peaks = peak_bytes(plan, costs, demand)
    return [replace(row, memory_bytes=peak) for row, peak in zip(rows, peaks, strict=True)]


class Traffic:
    """The bytes that every worker receives and sends for one minibatch, in the steady state.

    `weights` has what an owner sends to a reader after an update, by (owner, reader); `bases`, by worker, what it keeps
    of the last messages of weight copies, sent and received: the next are encoded as differences from them.
    """

    def __init__(self, plan: Plan, demand: Demand) -> None:
        self.arriving = [0] * plan.workers
        self.leaving = [0] * plan.workers
        self.weights: dict[tuple[int, int], int] = {}
        self.bases = [0] * plan.workers
        written, filling = CopyMessages(demand), Filling()
        steady = 4 * plan.workers  # a version that no warm-up reads
        for edge in plan.edges:
            self._add(edge.src, edge.dst, edge.sent.bytes * plan.own_microbatches)
        for owner in range(plan.workers):
            for reader in demand.readers(owner):
                messages = demand.messages(owner, reader, steady, 0, None)
                packs = [written.pack(owner, reader, steady, message.ahead, filling) for message in messages]
                sent = sum(size for pack in packs for size in pack.sizes.values())
                base = written.base_bytes(owner, reader, steady, filling)
                self.bases[owner] += base
                self.bases[reader] += base
                self.weights[owner, reader] = sent
                self._add(owner, reader, sent)

    def _add(self, source: int, target: int, count: int) -> None:
        self.leaving[source] += count
        self.arriving[target] += count


def begin(plan: Plan, bounds: tuple[int, int]) -> str:
    """The module in which a span of units begins."""
    return unit_name(plan.step.units[bounds[0]]) if bounds[0] < bounds[1] else "nothing"


def _passed_bytes(program: Program, part: Part) -> int:
    """Bytes that a part gets from the part before it: views of one value count once, the batch's tensors count, too."""
    local = len(part.spec.weights) + len(part.spec.buffers)
    nodes = list(part.graph.nodes)[local:][: len(part.passed)]
    by_name = {n.name: n for n in program.graph.nodes}
    roots = {viewed(by_name.get(node.name, node)) for node in nodes}
    return sum(size_of(root.meta["val"]) for root in roots)
