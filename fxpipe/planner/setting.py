"""What a schedule and a policy ask of devices: microbatches in flight, memory and time for each byte of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from fxpipe.errors import CutError
from fxpipe.plan.cost_records import PolicyTimes
from fxpipe.planner.links import Links
from fxpipe.planner.workers import Ratios, Recomputation, Workers
from fxpipe.policy import copies, default_for
from fxpipe.policy import make as make_policy
from fxpipe.policy.work import seconds_per_owned_byte
from fxpipe.schedule import Schedule, from_csv, make
from fxpipe.schedule.check import held_together, moments

MOMENTUM = 1.0
"""The default bytes of optimizer state for each byte of weights: SGD with momentum."""


@dataclass(frozen=True)
class Setting:
    """What a profile is planned for, with any number of workers.

    Attributes:
        schedule, policy, microbatches: decide what each worker holds; None means the schedule's default policy.
        links: between ranks.
        speeds, memory: of each rank; empty means equal and without limit. Workers of a rank share its memory: half of
            it alike, as they share weights, and half by the microbatches that they hold when the rank holds most.
        optimizer_bytes: of the optimizer's state, for each byte of weights.
        policy_times: of what policies do to weights.
        ratios: of what travels, where codecs pack it.
        placement: the rank of each worker, if there are that many; else the schedule's usual one.
        rows: of a schedule that was read from a file, as `Plan.rows`.
        recompute: what backwards may compute again to save memory.
        dp: how many replicas each worker has; `microbatches` are those of one.
    """

    schedule: str = "async"
    policy: str | None = None
    microbatches: int = 1
    links: Links = field(default_factory=Links)
    speeds: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    optimizer_bytes: float = MOMENTUM
    policy_times: PolicyTimes = field(default_factory=PolicyTimes)
    ratios: Ratios = field(default_factory=Ratios)
    placement: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    recompute: Recomputation = "none"
    dp: int = 1

    def schedule_of(self, count: int) -> Schedule:
        """The schedule of `count` workers.

        Raises:
            ScheduleError: an unknown name, or the schedule cannot have so many workers.
        """
        if self.rows:
            return _of_rows(self.rows)
        return make(self.schedule, count, self.microbatches, self.placement if len(self.placement) == count else ())

    def memory_of(self, ranks: int) -> tuple[float, ...]:
        """The memory of so many ranks; empty without limit."""
        return _for(ranks, self.memory)

    def workers(self, count: int) -> Workers:
        """`count` of these workers. Their number may differ from that of the speeds and memories only if those are all
        equal.

        Raises:
            ScheduleError, PolicyError: an unknown name.
            CutError: speeds, memories or links for another number of workers.
        """
        schedule = self.schedule_of(count)
        policy = make_policy(self.policy or default_for(schedule))
        weight, gradient = 1.0, 1.0
        kept = copies(policy, schedule)
        placement, ranks = schedule.placement, schedule.ranks
        speeds, memory = _for(ranks, self.speeds), self.memory_of(ranks)
        for name, values in (("speeds", speeds), ("memory", memory)):
            if len(values) not in (0, ranks):
                raise CutError(f"{len(values)} values of {name} for {ranks} workers")
        self.links.check(ranks)
        in_flight = held_together(schedule)
        shares = _shares(placement, in_flight)
        return Workers(
            count,
            speeds=tuple(speeds[rank] for rank in placement) if speeds else (),
            memory=tuple(memory[rank] * share for rank, share in zip(placement, shares, strict=True)) if memory else (),
            links=self.links.on(placement),
            microbatches=self.microbatches,
            in_flight=in_flight,
            owned_factor=tuple(weight + gradient + self.optimizer_bytes + count for count in kept),
            owned_ms=tuple(1e3 * s for s in seconds_per_owned_byte(policy, schedule, self.policy_times)),
            ratios=self.ratios,
            deferred=tuple(max(later for _, later in moments(schedule, k)) for k in range(count)),
            recompute=self.recompute,
        )


@lru_cache(maxsize=16)
def _of_rows(rows: tuple[str, ...]) -> Schedule:
    """The schedule of a plan's rows, kept for those who ask again: it is read and checked."""
    return from_csv("\n".join(rows))


def _shares(placement: Sequence[int], in_flight: Sequence[int]) -> list[float]:
    """Of its rank's memory, by worker."""
    of_ranks = [0] * (max(placement) + 1)
    for rank, count in zip(placement, in_flight, strict=True):
        of_ranks[rank] += count
    return [
        0.5 / placement.count(rank) + 0.5 * count / of_ranks[rank]
        for rank, count in zip(placement, in_flight, strict=True)
    ]


def _for(count: int, values: tuple[float, ...]) -> tuple[float, ...]:
    """The values themselves if there are that many; else that many copies of the one value they all have."""
    return values[:1] * count if len(set(values)) == 1 else values
