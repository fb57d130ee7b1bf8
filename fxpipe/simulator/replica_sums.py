"""What a worker's replicas cost it: the time of sums over them that its backward does not hide."""

from __future__ import annotations

from fxpipe.plan.spec import BucketSpec, Plan
from fxpipe.planner.links import Links


def exposed_sums(plan: Plan, worker: int, links: Links, backward: float, minibatch: float = 0.0) -> float:
    """Seconds of a minibatch for which a worker's update waits for sums over its replicas.

    Each replica sends 2(R − 1)/R of every bucket, in two rounds (the bound is that of Patarasuk and Yuan 2009). Buckets
    go one after the other while the last microbatch's gradients are made; the last one is complete only at their end.
    Where replicas share out the parameters, the first round is of gradients, and the second, of the new weights, comes
    after the update: nothing hides it. Of replicas that train apart, it is their share of the outer step, whose sum is
    of all trained weights; with a delay, the minibatches up to the next one hide it.

    Args:
        links: between the pipeline's ranks; those between replicas are taken to be like the slowest of them.
        backward: seconds in which a microbatch's gradients are made.
        minibatch: seconds that a minibatch takes at least.
    """
    buckets, outer = plan.stages[worker].buckets, plan.outer
    replicas = plan.replicas_of(worker)
    bandwidth, latency = links.slowest(plan.ranks)
    if outer is not None:
        size = 2 * (replicas - 1) / replicas * sum(p.tensor.bytes for p in plan.owned(worker) if p.trained)
        hidden, copying = outer.delay * outer.every * minibatch, links.copy * 2 * size
        return (max(0.0, size / bandwidth + 2 * latency - hidden) + copying) / outer.every if size else 0.0
    if replicas == 1 or not buckets:
        return 0.0
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
