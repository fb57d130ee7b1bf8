"""Forecasts: what a minibatch takes with a partition, and how its replicas are written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from fxpipe.planner.partition import Partition
from fxpipe.planner.workers import Workers


def minibatch_seconds(partition: Partition, workers: Workers, flush: bool) -> float:
    """Seconds of a minibatch: the slowest worker's, and with a flush also what filling and draining the pipeline takes.

    That is one microbatch on every other worker: what a process does of it, without its share of the update.
    """
    steady = workers.microbatches * partition.bottleneck
    if not flush:
        return steady
    alone = [
        (load.total - load.update) * workers.microbatches / workers.own_microbatches(k)
        for k, load in enumerate(partition.loads)
    ]
    slowest = max(range(workers.count), key=lambda k: partition.loads[k].total)
    return steady + sum(alone) - alone[slowest]


def notation(replicas: Sequence[int]) -> str:
    """PipeDream's: `15-1`; `16` for data parallelism; `straight` if every worker has one process.

    Runs of equal numbers are written once, where there are more than three: `4×2-8`.
    """
    if len(replicas) > 1 and set(replicas) == {1}:
        return f"straight ({len(replicas)})"
    parts = []
    for count, run in groupby(replicas):
        length = len(list(run))
        parts += [f"{length}×{count}"] if length > 3 else [str(count)] * length
    return "-".join(parts)
