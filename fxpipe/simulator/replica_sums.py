"""What a worker's replicas cost it: the time of sums over them that its backward does not hide."""

from __future__ import annotations

from fxpipe.plan.spec import Plan
from fxpipe.planner.links import Links


def exposed_sums(plan: Plan, worker: int, links: Links, backward: float, minibatch: float = 0.0) -> float:
    """Seconds of a minibatch for which a worker's update waits for sums over its replicas.

    Each replica sends 2(R − 1)/R of every bucket, in two rounds (the bound is that of Patarasuk and Yuan 2009). Buckets
    go one after the other while the last microbatch's gradients are made; the last one is complete only at their end.
    Of replicas that train apart, it is their share of the outer step, whose sum is of all trained weights; with a
    delay, the minibatches up to the next one hide it.

    Args:
        links: between the pipeline's ranks; those between replicas are taken to be like the slowest of them.
        backward: seconds in which a microbatch's gradients are made.
        minibatch: seconds that a minibatch takes at least.
    """
    outer = plan.outer
    sizes = [bucket.bytes for bucket in plan.stages[worker].buckets]
    if outer is not None and (trained := sum(p.tensor.bytes for p in plan.owned(worker) if p.trained)):
        sizes = [trained]
    if plan.dp == 1 or not sizes:
        return 0.0
    pairs = [(source, target) for source in range(plan.ranks) for target in range(plan.ranks) if source != target]
    pairs = pairs or [(0, 0)]  # of one rank: as the links of all are
    bandwidth = min(links.bandwidth_of(*pair) for pair in pairs)
    latency = max(links.latency_of(*pair) for pair in pairs)
    share = 2 * (plan.dp - 1) / plan.dp
    times = [share * size / bandwidth + 2 * latency for size in sizes]
    copying = links.copy * 2 * share * sum(sizes)  # sent and received
    if outer is not None:
        hidden = outer.delay * outer.every * minibatch
        return (max(0.0, sum(times) - hidden) + copying) / outer.every
    return max(times[-1], sum(times) - backward) + copying
