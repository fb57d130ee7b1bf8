"""How long messages between the processes of workers take: from neighbours, among replicas, and from few to many.

Without machines, every process has its own link to every other. With machines (`Workers.machines`), all that leaves a
machine goes over one link, which its processes share. A worker's messages with a neighbour stay within a machine if all
its own processes and the neighbour's nearest process are on it. If the neighbour has more processes elsewhere, their
messages occupy the link of that machine (`fans`), and count as a cost of the neighbour. So a worker's cost depends on
where its own processes are, but not on the replicas of its neighbours.

Replicas add up gradients as in a run (docs/design/replicas.md): each of r replicas owns a part, receives that part from
the others and sends them the sum, in all 2(r − 1)/r of the bytes. If c of them share a machine, c(r − c)/r of the bytes
leave it, twice. A ring would send less between machines, but adds in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fxpipe.planner.sums_over_runs import Floats

if TYPE_CHECKING:
    from fxpipe.planner.workers import Workers


@dataclass(frozen=True)
class LinkTimes:
    """One link: milliseconds per byte, and latency in milliseconds.

    Attributes:
        copied: bytes that the processor copies for each byte.
        sharing: how many processes the link serves in turn; `rate` includes that.
    """

    rate: float
    latency: float
    copied: float = 1.0
    sharing: int = 1

    def occupied(self, size: Floats) -> Floats:
        """How long that many bytes occupy the link."""
        return size * self.rate


@dataclass(frozen=True)
class GradientExchange(LinkTimes):
    """The exchange of gradients among a worker's replicas; `occupied` includes the latency of its two rounds."""

    def occupied(self, size: Floats) -> Floats:
        """How long the exchange of that many bytes takes."""
        return size * self.rate + 2 * self.latency


def link_from(workers: Workers, other: int, worker: int) -> LinkTimes:
    """The link on which one process of a worker receives from a neighbour; free if there is no such worker."""
    if not 0 <= other < workers.count:
        return LinkTimes(0.0, 0.0)
    links, machines = workers.links, workers.machines
    if machines is None:
        return LinkTimes(1e3 / links.bandwidth_of(other, worker), 1e3 * links.latency_of(other, worker))
    counts, first, end = _places(workers, worker)
    border = first if other < worker else end
    if len(counts) == 1 and border % machines.size:
        inner = machines.inner
        return LinkTimes(1e3 / inner.bandwidth_of(0, 0), 1e3 * inner.latency_of(0, 0))
    shared = max(counts)
    return LinkTimes(1e3 * shared / links.bandwidth_of(0, 0), 1e3 * links.latency_of(0, 0), sharing=shared)


def all_reduce(workers: Workers, worker: int) -> GradientExchange:
    """The exchange of gradients among a worker's replicas, for each byte of its weights."""
    links, machines, count = workers.links, workers.machines, workers.dp * workers.replicas_of(worker)
    if count == 1:
        return GradientExchange(0.0, 0.0, 0.0)
    sent = 2 * (count - 1) / count
    if machines is None:
        bandwidth, latency = links.slowest(workers.count)
        return GradientExchange(1e3 * sent / bandwidth, 1e3 * latency, 2 * sent)
    counts, _, _ = _places(workers, worker)
    inner = machines.inner
    within = 2 * (max(counts) - 1) / count / inner.bandwidth_of(0, 0)
    if len(counts) == 1:
        return GradientExchange(1e3 * within, 1e3 * inner.latency_of(0, 0), 2 * sent)
    between = max(2 * here * (count - here) / count for here in counts) / links.bandwidth_of(0, 0)
    return GradientExchange(1e3 * max(within, between), 1e3 * links.latency_of(0, 0), 2 * sent)


def exposed_exchange(workers: Workers, worker: int, weights: Floats, hidden: Floats) -> Floats:
    """How long a worker's update waits for the exchange of gradients, in milliseconds per minibatch.

    Args:
        weights: bytes that it owns.
        hidden: milliseconds of the last microbatch's backward, which runs meanwhile.
    """
    taken = np.where(weights > 0, all_reduce(workers, worker).occupied(weights), 0.0)
    return np.maximum(taken - hidden, 0.0)


def fans(workers: Workers, worker: int) -> tuple[float, float]:
    """How long a worker's messages occupy a wire, per byte that crosses the boundary before it, and after it.

    In milliseconds, for a microbatch of one process. The wire is that of the process. Only if the worker is on several
    machines, and shares one of them with the neighbour's nearest process, it may be the wire of that machine, which
    then carries the messages of the worker's processes on the others.
    """
    rates = []
    for other in (worker - 1, worker + 1):
        if not 0 <= other < workers.count:
            rates.append(0.0)
            continue
        rate, machines = link_from(workers, other, worker).rate, workers.machines
        if machines is not None:
            counts, first, end = _places(workers, worker)
            near, border = (counts[0], first) if other < worker else (counts[-1], end)
            if len(counts) > 1 and border % machines.size:
                elsewhere = workers.replicas_of(worker) - near
                rate = max(rate, 1e3 * elsewhere / workers.links.bandwidth_of(0, 0))
        rates.append(rate)
    return rates[0], rates[1]


def _places(workers: Workers, worker: int) -> tuple[tuple[int, ...], int, int]:
    """How many of a worker's processes each machine has, the first of them, and their end."""
    assert workers.machines is not None
    first = sum(workers.replicas_of(k) for k in range(worker))
    count = workers.replicas_of(worker)
    return workers.machines.counts(first, count), first, first + count
