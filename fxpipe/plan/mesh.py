"""Where the processes of a run are, and how replicas that train independently combine their weights."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from fxpipe.options import option


@dataclass(frozen=True)
class Mesh:
    """The processes of a run: those of a rank are neighbours, or, if `apart`, those of a replica.

    With equal numbers of replicas it has two dimensions: `pp`, the ranks of the pipeline, and `dp`, the replicas.

    Attributes:
        placement: as in `Plan`.
        replicas: how many each rank has; empty if each has one.
        `apart`: replicas are independent: the processes of a replica, not of a rank, are neighbours.
    """

    placement: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    apart: bool = False

    @property
    def plain(self) -> bool:
        """Whether each process has one worker without other replicas."""
        return not self.replicated and len(set(self.placement)) == len(self.placement)

    @property
    def replicated(self) -> bool:
        """Whether a rank has several replicas."""
        return max(self.replicas, default=1) > 1

    @property
    def noun(self) -> str:
        """The word for a process: worker, rank or replica."""
        return "worker" if self.plain else "process" if self.replicated else "rank"

    @property
    def groups(self) -> list[list[int]]:
        """The processes of each rank that has several."""
        return [list(self.of_rank(rank)) for rank, count in enumerate(self.replicas) if count > 1]

    def rank_of(self, worker: int) -> int:
        """The rank that a worker runs on."""
        return self.placement[worker] if self.placement else worker

    def process_of(self, worker: int, replica: int) -> int:
        """The process that has a replica of a worker."""
        return self.of_rank(self.rank_of(worker))[replica]

    def of_rank(self, rank: int) -> range:
        """The processes of a rank, one for each replica."""
        if not self.replicas:
            return range(rank, rank + 1)
        if self.apart:
            ranks = len(self.replicas)
            return range(rank, ranks * self.replicas[rank], ranks)
        first = sum(self.replicas[:rank])
        return range(first, first + self.replicas[rank])

    def seat(self, process: int) -> tuple[int, int]:
        """The rank of a process, and the number of its replica."""
        if self.apart:
            replica, rank = divmod(process, len(self.replicas))
            return rank, replica
        ends = list(accumulate(self.replicas))
        rank = bisect_right(ends, process) if ends else process
        return rank, process - self.of_rank(rank)[0]


MESH = Mesh()
"""One worker a process, and no replicas."""


@dataclass(frozen=True)
class OuterSpec:
    """How independent replicas combine their weights (`fxpipe/runtime/worker/outer_step.py`).

    Attributes:
        every: the number of updates before each outer step.
        lr, momentum: of the outer step, which is one of SGD with Nesterov momentum.
        delay: how many outer steps later the result of an exchange is applied: 0 or 1.
        codec: encodes what each replica sends (`fxpipe.codecs`), with its option; '' sends it as it is.
    """

    every: int = option(64, minimum=1, metavar="H", help="With --outer: average after H updates. [default: 64]")
    lr: float = option(
        0.7,
        above=0,
        below=1000,
        metavar="RATE",
        help="With --outer: learning rate of the step. [default: 0.7, or 1 with a codec that carries over]",
    )
    momentum: float = option(
        0.9,
        minimum=0,
        below=1,
        metavar="M",
        help="With --outer: Nesterov momentum of the step. [default: 0.9, or 0 with a codec that carries over]",
    )
    delay: int = option(
        0,
        minimum=0,
        maximum=1,
        metavar="D",
        help="With --outer: 1 applies an average one such step later, so that nothing waits for it. [default: 0]",
    )
    codec: str = ""

    @property
    def kept(self) -> int:
        """How many times a replica stores the bytes of trained weights for outer steps, at most: the common weights,
        the momentum, what a codec leaves out and, with a delay, this and the weights as an exchange began."""
        return 1 + (self.momentum > 0) + self.delay + (1 + self.delay) * bool(self.codec)

    def __str__(self) -> str:
        late = ", one step late" if self.delay else ""
        sent = f", sent as {self.codec}" if self.codec else ""
        return f"outer steps every {self.every} updates (lr {self.lr:g}, momentum {self.momentum:g}{late}{sent})"
