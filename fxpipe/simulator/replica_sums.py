"""What a worker's replicas cost it: the time of sums over them that its backward does not hide."""

from __future__ import annotations

from fxpipe.plan.spec import BucketSpec, Plan
from fxpipe.planner.links import Links


def exposed_sums(plan: Plan, worker: int, links: Links, backward: float) -> float:
    """Seconds of a minibatch for which a worker's update waits for sums over its replicas.

    Each replica sends 2(R − 1)/R of every bucket, in two rounds (the bound is that of Patarasuk and Yuan 2009). Buckets
    go one after the other while the last microbatch's gradients are made; the last one is complete only at their end.
    Where replicas share out the parameters, the first round is of gradients, and the second, of the new weights, comes
    after the update: nothing hides it.

    Args:
        links: between the pipeline's ranks; those between replicas are taken to be like the slowest of them.
        backward: seconds in which a microbatch's gradients are made.
    """
    buckets = plan.stages[worker].buckets
    replicas = plan.replicas_of(worker)
    if replicas == 1 or not buckets:
        return 0.0
    bandwidth, latency = links.slowest(plan.ranks)
    rounds = [_round(plan, bucket, replicas) / bandwidth + latency for bucket in buckets]
    times, after = (rounds, sum(rounds)) if plan.sharded else ([2 * each for each in rounds], 0.0)
    copying = links.copy * 4 * (replicas - 1) / replicas * sum(bucket.bytes for bucket in buckets)  # sent and received
    return max(times[-1], sum(times) - backward) + after + copying


def _round(plan: Plan, bucket: BucketSpec, replicas: int) -> float:
    """The most bytes that a replica sends, or receives, in one round of a bucket's exchange."""
    if not bucket.sharded:
        return (replicas - 1) / replicas * bucket.bytes
    sizes = {name: p.tensor.bytes for p in plan.parameters for name in p.names}
    parts = [0] * replicas
    for name, replica in zip(bucket.parameters, bucket.updaters, strict=True):
        parts[replica] += sizes[name]
    return float(max((replicas - 1) * max(parts), sum(parts) - min(parts)))
