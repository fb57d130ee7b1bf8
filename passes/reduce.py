"""reduce: the gradients of a worker with replicas go into buckets, which the replicas add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from fxpipe.errors import CutError
from fxpipe.ir import wire
from fxpipe.ir.aten import is_sparse
from fxpipe.ir.program import INFO, Level, NodeInfo, Program, home_of, info, value
from fxpipe.ir.transform import Pass
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import BucketSpec
from fxpipe.task.batch import tensor_spec

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's default."""

SHARE = 8
"""At least how many buckets a worker's gradients go into, unless these would be as small as the last one.

The sum of a bucket begins when its last gradient is there. A bucket that holds most of them would begin when little
is left to hide it.
"""

LAST_BYTES = 2**20
"""Other buckets are summed while the rest is computed; nothing hides the last sum, so that bucket is small.

DistributedDataParallel makes its *first* bucket this small, to send early; here the first bucket has the remaining
gradients.
"""


@dataclass(frozen=True)
class Reduce(Pass):
    """Hand gradients over to be added up over replicas, when all gradients of a bucket exist.

    Buckets hold gradients in the order in which the code makes them, in the phase that returns them: B, or W if weight
    gradients are separate. They are filled from the last gradient backwards, and each has one dtype. Gradients are
    still returned: the part has only more calls.

    Fields:
        replicas: of each worker.
        bucket_bytes: the limit of a bucket, unless one gradient alone is larger; None for `BUCKET_BYTES`, or a
            worker's `SHARE` if that is less.
        last_bytes: the same for the last bucket of a dtype, if that is less.
        sharded: whether a replica gets only its own part of the sums, for the parameters that it updates. Whole
            parameters are distributed, so that replicas have about equal bytes.
        buckets: by worker, the buckets of another shape of batch, to be made again in their order; then no others are
            made, and a parameter without a gradient here is None.

    Before:  d2 = mm(g, h)                   After:  d2 = mm(g, h)
             d1 = mm(g2, x)                          comm.all_reduce("bucket_0", [d2])
             return (d1, d2)                         d1 = mm(g2, x)
                                                     comm.all_reduce("bucket_1", [d1])
                                                     return (d1, d2)
    """

    name: ClassVar[str] = "reduce"
    requires: ClassVar[Level] = Level.WIRED
    provides: ClassVar[Level] = Level.WIRED

    replicas: tuple[int, ...] = ()
    bucket_bytes: int | None = None
    last_bytes: int = LAST_BYTES
    sharded: bool = False
    buckets: tuple[tuple[BucketSpec, ...], ...] = ()

    @staticmethod
    def like(plan: Plan) -> Reduce | None:
        """The pass that makes the buckets of a plan; None without replicas, or with independent ones."""
        if not plan.replicas or plan.outer is not None:
            return None
        return Reduce(plan.replicas, buckets=tuple(s.buckets for s in plan.stages))

    def __call__(self, program: Program) -> Program:
        if max(self.replicas, default=1) == 1:
            return program
        assert program.cuts is not None
        assert len(self.replicas) == program.cuts.workers
        program = program.copy(replicas=self.replicas)
        buckets = [
            self._of_worker(_Gradients(program, worker)) if count > 1 else ()
            for worker, count in enumerate(self.replicas)
        ]
        return replace(program, buckets=tuple(buckets))

    def _of_worker(self, gradients: _Gradients) -> tuple[BucketSpec, ...]:
        buckets = self.buckets[gradients.worker] if self.buckets else self._fill(gradients)
        gradients.check_in(buckets)
        after: fx.Node | None = None
        for bucket in buckets:
            after = gradients.hand_over(bucket, after)
        return buckets

    def _fill(self, gradients: _Gradients) -> tuple[BucketSpec, ...]:
        """Buckets of all gradients, in the order in which their last members become ready."""
        closed: list[list[str]] = []
        filling: dict[torch.dtype, list[str]] = {}
        room: dict[torch.dtype, int] = {}
        names = list(gradients.nodes)
        share = sum(gradients.sizes.values()) // SHARE
        most = self.bucket_bytes or min(BUCKET_BYTES, max(self.last_bytes, share))
        for name in reversed(names):
            dtype, size = value(gradients.nodes[name]).dtype, gradients.size(name)
            if dtype not in room or size > room[dtype]:
                limit = most if dtype in room else min(self.last_bytes, most)
                filling[dtype], room[dtype] = [], limit
                closed.append(filling[dtype])
            filling[dtype].append(name)
            room[dtype] -= size
        place = {name: i for i, name in enumerate(names)}
        ordered = sorted((members[::-1] for members in closed), key=lambda members: place[members[-1]])
        updaters = shared_out(gradients.sizes, self.replicas[gradients.worker]) if self.sharded else {}
        return tuple(
            BucketSpec(
                f"bucket_{i}",
                tuple(members),
                sum(map(gradients.size, members)),
                self.sharded,
                tuple(updaters[name] for name in members if self.sharded),
            )
            for i, members in enumerate(ordered)
        )


def shared_out(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """A replica for each of these names, with about equal bytes: the largest first, to the replica with the least."""
    held = [0] * replicas
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # stable: equal ones keep their order
        owners[name] = held.index(min(held))
        held[owners[name]] += sizes[name]
    return owners


class _Gradients:
    """The gradients that a worker makes, in the order in which they become ready in the phase that returns them."""

    def __init__(self, program: Program, worker: int) -> None:
        self.graph = program.graph
        self.worker = worker
        self.phase = program.phases[-1]
        self.calls = [n for n in program if info(n).worker == worker and info(n).phase == self.phase]
        self.order = {node: i for i, node in enumerate(program.graph.nodes)}
        self.existing = set(self.calls)  # inputs of the phase exist from its start
        names = {p.node: p.names[0] for p in program.parameters}
        gradients = {names[p]: node for p, node in program.gradients().items() if home_of(node) == worker}
        ready = sorted(gradients.items(), key=lambda row: (row[1] in self.existing, self.order[row[1]]))
        self.nodes = dict(ready)
        for name, node in ready:
            if is_sparse(node):
                raise CutError(
                    f"the gradient of {name} is sparse, so it cannot be summed over replicas",
                    where=f"{info(node).source}: {info(node).text}" if node.op == "call_function" else None,
                    hint="make it dense (an embedding: sparse=False), or give its worker one replica",
                )

    def size(self, name: str) -> int:
        """Bytes of a sum of a parameter's gradients."""
        return tensor_spec(value(self.nodes[name])).sum_bytes

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of all gradients."""
        return {name: self.size(name) for name in self.nodes}

    def check_in(self, buckets: Sequence[BucketSpec]) -> None:
        """Refuse gradients that are in no bucket."""
        members = {name for bucket in buckets for name in bucket.parameters}
        if more := [name for name in self.nodes if name not in members]:
            raise CutError(
                f"{more[0]} gets a gradient on worker {self.worker}, but not for batches of the first shape: its "
                "replicas do not add it up",
                hint="let the first batch be one that gives every parameter a gradient",
                page="batch-shapes",
            )

    def hand_over(self, bucket: BucketSpec, after: fx.Node | None) -> fx.Node:
        """The call for a bucket: after its last member, and after another call."""
        members = [self.nodes.get(name) for name in bucket.parameters]
        computed = [node for node in members if node in self.existing]
        last = max((node for node in computed if node is not None), key=self.order.__getitem__, default=None)
        anchor = max((n for n in (after, last) if n is not None), key=self.order.__getitem__, default=None)
        target = wire.reduce_scatter if bucket.sharded else wire.all_reduce
        begin = anchor.next if anchor else self.calls[0] if self.calls else self.graph.output_node()
        name = f"{self.phase.lower()}_{self.worker}_{bucket.name}"
        with self.graph.inserting_before(begin):
            node = self.graph.create_node("call_function", target, (bucket.name, members), {}, name=name)
        record = next((info(n) for n in (last, *self.calls) if n), NodeInfo(self.phase))
        weight = self.phase == "W" or any(n.op == "call_function" and info(n).weight for n in members if n)
        node.meta["val"] = None
        place = {"phase": self.phase, "region": None, "unit": max(record.unit, 0), "worker": self.worker}
        node.meta[INFO] = record.copy(**place, bytes=bucket.bytes, seconds=0.0, weight=weight)
        self.order[node] = self.order[anchor] if anchor else -1
        return node
