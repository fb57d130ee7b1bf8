"""What a worker's replicas cost it: the time of sums over them that its backward does not hide."""

from __future__ import annotations

from fxpipe.plan.spec import Plan
from fxpipe.planner.links import Links


def exposed_sums(plan: Plan, worker: int, links: Links, backward: float) -> float:
    """Seconds of a minibatch for which a worker's update waits for sums over its replicas.

    Each replica sends 2(R − 1)/R of every bucket, in two rounds (the bound is that of Patarasuk and Yuan 2009). Buckets
    go one after the other while the last microbatch's gradients are made; the last one is complete only at their end.

    Args:
        links: between the pipeline's ranks; those between replicas are taken to be like the slowest of them.
        backward: seconds in which a microbatch's gradients are made.
    """
    buckets = plan.stages[worker].buckets
    replicas = plan.replicas_of(worker)
    if replicas == 1 or not buckets:
        return 0.0
    bandwidth, latency = links.slowest(plan.ranks)
    share = 2 * (replicas - 1) / replicas
    times = [share * bucket.bytes / bandwidth + 2 * latency for bucket in buckets]
    copying = links.copy * 2 * share * sum(bucket.bytes for bucket in buckets)  # sent and received
    return max(times[-1], sum(times) - backward) + copying
