"""Which replica of another worker a replica exchanges its messages with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaSeat:
    """One replica of a worker, as its messages see it.

    Microbatch i of the whole minibatch is done by replica i mod r of a worker that has r: that decides who sends and
    receives the value of an edge. What does not depend on a microbatch (weights, losses, norms, shapes) all replicas of
    a worker have alike: replica i takes it from replica i mod r. Where all have equally many, both stay in the pipeline
    of replica i.

    Attributes:
        replicas: how many each worker has; empty where each has one, or messages of each pipeline are apart.
    """

    worker: int
    replica: int = 0
    replicas: tuple[int, ...] = ()

    def number(self, own: int) -> int:
        """The number, in the whole minibatch, of an own microbatch."""
        return own * self._count(self.worker) + self.replica

    def peer(self, worker: int, own: int) -> int:
        """The replica of another worker that has an own microbatch, too."""
        return self.number(own) % self._count(worker)

    def told(self, worker: int) -> tuple[int, ...]:
        """The replicas of another worker that this one tells what does not depend on a microbatch."""
        return tuple(range(self.replica, self._count(worker), self._count(self.worker)))

    def teller(self, worker: int) -> int:
        """The replica of another worker that tells this one."""
        return self.replica % self._count(worker)

    def _count(self, worker: int) -> int:
        return self.replicas[worker] if self.replicas else 1
