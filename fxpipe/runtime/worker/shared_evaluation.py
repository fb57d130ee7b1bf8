"""The batches of an evaluation, shared out over replicas: replica j of R evaluates batch b if b mod R is j.

Each replica of worker 0 reads all batches, and gets what the workers of its own pipeline have made of its share. Then
they give each other the numbers: the metrics are added up as without replicas, in the order of the batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch

from fxpipe.plan.spec import Plan
from fxpipe.runtime.wires.collective import Collective
from fxpipe.runtime.worker.evaluation_data import Placed
from fxpipe.runtime.worker.replicas_data import check_read_alike


def sharing(plan: Plan) -> int:
    """How many replicas of each worker share an evaluation's batches out.

    One, which evaluates all, where a batch changes buffers that the next one reads, or replicas have weights of their
    own.
    """
    carries = any(stage.part.updates for spec in plan.evaluations for stage in spec.stages)
    return 1 if carries or plan.outer is not None else plan.dp


def put_together(
    plan: Plan, read: Sequence[Placed], values: Sequence[Sequence[float]], collective: Collective
) -> list[list[float]]:
    """The metrics of all batches by worker, as `means` takes them; called by all replicas of worker 0.

    Args:
        read: all batches.
        values: the metrics that each worker of this pipeline computed, batch after batch of its share.

    Raises:
        RunError: the replicas have read different batches.
        PeerLost: another replica is gone.
    """
    replica, replicas = collective.replica, collective.replicas
    said = torch.zeros(replicas, 2, dtype=torch.int64)
    said[replica, 0] = len(read)
    said[replica, 1] = zlib.crc32(repr([(batch.shape, batch.weight, batch.checksum) for batch in read]).encode())
    collective.start_sum(("evaluation", 0), said.to(plan.device).flatten())
    of_replicas = collective.take(("evaluation", 0)).reshape(replicas, 2).tolist()
    check_read_alike(of_replicas, "an evaluation", "eval_data()")
    evaluations = [plan.evaluations[batch.shape] for batch in read]
    counts = [[len(spec.stages[worker].part.metrics) for spec in evaluations] for worker in range(plan.workers)]
    rows: list[float] = []
    for of_worker, made in zip(counts, map(iter, values), strict=True):
        for number, count in enumerate(of_worker):
            own = number % replicas == replica
            rows += [next(made) if own else 0.0 for _ in range(count)]
    if not rows:
        return [[] for _ in values]
    collective.start_sum(("metrics", 0), torch.tensor(rows, dtype=torch.float64, device=plan.device))
    found: Iterator[float] = iter(collective.take(("metrics", 0)).tolist())
    return [[next(found) for _ in range(sum(of_worker))] for of_worker in counts]
