"""The input of a simulation: the workers' costs, their messages and the links. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpipe.plan.cost_records import StageTime
from fxpipe.plan.spec import Phase
from fxpipe.plan.urgency import URGENT
from fxpipe.planner.links import Links


@dataclass(frozen=True)
class Message:
    """A value that is sent once per microbatch.

    Attributes:
        made: it is sent after this share of the source action's own compute.
        needed: it is waited for after this share of the destination action's own compute.
        places: of its send in the source action and of its wait in the destination action: at the same share, smaller
            places come first. By default, waits come first.
        turn: whether it is sent at once or waits for its turn on the link (see `fxpipe.plan.urgency`).
    """

    src: int
    src_phase: Phase
    dst: int
    dst_phase: Phase
    bytes: float
    made: float = 1.0
    needed: float = 0.0
    places: tuple[int, int] = (1, 0)
    turn: int = URGENT


NEVER = -1
"""Instead of a lag: the microbatch does not read these weights."""


@dataclass(frozen=True)
class WeightCopy:
    """Weights that their owner sends to one reader after each of its updates, as one message.

    Attributes:
        reads: phases with their lags by microbatch: this phase of a microbatch of minibatch m begins once the reader
            has version max(0, m − lag). `NEVER` means that the microbatch reads none of these messages. Version v is
            the weights after v updates; every worker has version 0 from the start.
        turn: as in `Message`.
    """

    owner: int
    reader: int
    reads: tuple[tuple[Phase, tuple[int, ...]], ...]
    bytes: float
    turn: int = URGENT


@dataclass(frozen=True)
class Scenario:
    """Workers, their messages, and the links between them.

    An update comes at the end of a minibatch's last action, before new weights are sent. If weight gradients have a
    separate time and the schedule has no W, the backward spends it at its end. Sends and waits at the same point and
    place of an action keep the order given here.

    Attributes:
        links: between workers.
        placement: the rank of each worker; empty if each has its own. Within a rank, messages cost nothing.
        sums: by worker, seconds from the end of a minibatch's last action until the sum over replicas is there, for
            which the update waits; empty without replicas.

    Raises:
        ProfileError: the links are for another number of workers.
    """

    workers: tuple[StageTime, ...]
    messages: tuple[Message, ...] = ()
    weight_copies: tuple[WeightCopy, ...] = ()
    links: Links = field(default_factory=Links)
    placement: tuple[int, ...] = ()
    sums: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.links.check(len(self.workers))

    def within(self, a: int, b: int) -> bool:
        """Whether two workers are on one rank."""
        return a == b or (bool(self.placement) and self.placement[a] == self.placement[b])

    def busy(self, worker: int, microbatches: int) -> float:
        """Seconds that a minibatch keeps a worker busy in the steady state: compute, its updates, and copying."""
        cost = self.workers[worker]
        moved = sum(m.bytes for m in self.messages if worker in (m.src, m.dst) and not self.within(m.src, m.dst))
        weights = sum(
            r.bytes for r in self.weight_copies if worker in (r.owner, r.reader) and not self.within(r.owner, r.reader)
        )
        action = cost.microbatch + self.links.copy * moved
        return microbatches * action + cost.update + self.links.copy * weights
