"""What messages between the processes of workers cost: from neighbours, and the sums of gradients among replicas.

Every process has a link of its own to any other. The sums are exchanged as a run does it (docs/design/0048): each of r
replicas owns a part, gets that part from the others and hands the result out, which sends 2(r − 1)/r of the bytes from
each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxpipe.planner.sums_over_runs import Floats
from fxpipe.planner.workers import Workers


@dataclass(frozen=True)
class LinkTimes:
    """One link: milliseconds per byte, and latency in milliseconds."""

    rate: float
    latency: float

    def occupied(self, size: Floats) -> Floats:
        """How long that many bytes occupy the link."""
        return size * self.rate


def link_from(workers: Workers, other: int, worker: int) -> LinkTimes:
    """The link on which one process of a worker receives from a neighbour; free if there is no such worker."""
    if not 0 <= other < workers.count:
        return LinkTimes(0.0, 0.0)
    links = workers.links
    return LinkTimes(1e3 / links.bandwidth_of(other, worker), 1e3 * links.latency_of(other, worker))


def exchange(workers: Workers, worker: int, weights: Floats, hidden: Floats) -> tuple[Floats, Floats]:
    """What the exchange of gradients among a worker's replicas takes of a minibatch.

    Args:
        weights: bytes of what it owns.
        hidden: milliseconds of the backward of the last microbatch, meanwhile.

    Returns:
        The milliseconds for which its update waits, and the bytes that its processor copies.
    """
    count = workers.dp * workers.replicas_of(worker)
    sent = 2 * (count - 1) / count * weights
    bandwidth, latency = workers.links.slowest(workers.count)
    taken = np.where(sent > 0, 1e3 * (sent / bandwidth + 2 * latency), 0.0)
    return np.maximum(taken - hidden, 0.0), 2 * sent
