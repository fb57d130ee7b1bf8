"""What a schedule and a policy ask of devices: microbatches in flight, memory and time for each byte of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from fxpipe.errors import CutError
from fxpipe.plan.cost_records import PolicyTimes
from fxpipe.planner.workers import Conditions, Workers
from fxpipe.policy import copies, default_for
from fxpipe.policy import make as make_policy
from fxpipe.policy.costs import seconds_per_owned_byte
from fxpipe.schedule import Schedule, from_csv, make, with_replicas
from fxpipe.schedule.check import moments
from fxpipe.schedule.graph import Graph

MOMENTUM = 1.0
"""The default bytes of optimizer state for each byte of weights: SGD with momentum."""


@dataclass(frozen=True)
class StageDemands:
    """What a schedule and a policy ask of a worker that has one process.

    Attributes:
        owned_factor, owned_ms: as in `Workers`.
        depth: workers from this one to the last.
        held: the most microbatches that it holds.
        deferred: the most of these that are between B and W, if W is separate.
        flush: whether it holds none between two minibatches.
    """

    owned_factor: float
    owned_ms: float
    depth: int
    held: int
    deferred: int
    flush: bool


class Slot(NamedTuple):
    """A worker's processes, those of the workers before it, and those of the workers after it."""

    before: int
    own: int
    after: int


@dataclass(frozen=True)
class Setting(Conditions):
    """What a profile is planned for, with any number of workers. `microbatches` are those of one replica of `dp`.

    Attributes:
        schedule, policy: decide what each worker holds; None means the schedule's default policy.
        speeds, memory: of each rank; empty means equal and without limit. Workers of a rank share its memory: one half
            equally, for weights, the other in proportion to the microbatches that they hold when the rank holds most.
        optimizer_bytes: bytes of optimizer state for each byte of weights.
        outer_bytes: bytes that outer steps keep for each byte of weights.
        policy_times: the times of policies' work on weights.
        placement: the rank of each worker; for another number of workers, the schedule's usual placement.
        rows: of a schedule that was read from a file, as `Plan.rows`.
        replicas: the number of each worker's replicas, if they differ; they share the microbatches.
    """

    schedule: str = "async"
    policy: str | None = None
    speeds: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    optimizer_bytes: float = MOMENTUM
    outer_bytes: float = 0.0
    policy_times: PolicyTimes = field(default_factory=PolicyTimes)
    placement: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    replicas: tuple[int, ...] = ()

    def schedule_of(self, count: int) -> Schedule:
        """The schedule of `count` workers.

        Raises:
            ScheduleError: an unknown name, or the schedule cannot have so many workers.
        """
        if self.rows:
            return from_csv("\n".join(self.rows), title=self.schedule)
        placement = self.placement if len(self.placement) == count else ()
        schedule = make(self.schedule, count, self.microbatches, placement)
        return with_replicas(schedule, self.replicas) if len(self.replicas) == count else schedule

    def memory_of(self, ranks: int) -> tuple[float, ...]:
        """The memory of each of `ranks` ranks; empty without limit."""
        return _for(ranks, self.memory)

    def workers(self, count: int, replicas: tuple[int, ...] = (), graph: Graph = ()) -> Workers:
        """`count` workers, each with its number of `replicas`, or with one process; a chain, or with this graph.

        There may be more or fewer workers than speeds and memories only if these are all equal. Replicas need that,
        too.

        Raises:
            ScheduleError, PolicyError: an unknown name.
            CutError: speeds, memories, links or replicas for another number of workers.
        """
        schedule = self.schedule_of(count).along(graph)
        if not replicas and len(self.replicas) == count:
            replicas = self.replicas
        if replicas:
            return self._replicated(schedule, replicas)
        stages, placement, ranks = self._stages(schedule), schedule.placement, schedule.ranks
        speeds, memory = _for(ranks, self.speeds), self.memory_of(ranks)
        for name, values in (("speeds", speeds), ("memory", memory)):
            if len(values) not in (0, ranks):
                raise CutError(
                    f"there are {len(values)} values of {name} for {ranks} processes",
                    hint="give one value for each process, or one for all",
                )
        self.links.check(ranks)
        shares = _shares(placement, [stage.held for stage in stages])
        return Workers(
            count,
            speeds=tuple(speeds[rank] for rank in placement) if speeds else (),
            memory=tuple(memory[rank] * share for rank, share in zip(placement, shares, strict=True)) if memory else (),
            in_flight=tuple(stage.held for stage in stages),
            owned_factor=tuple(stage.owned_factor for stage in stages),
            owned_ms=tuple(stage.owned_ms for stage in stages),
            deferred=tuple(stage.deferred for stage in stages),
            **self.shared | {"links": self.links.on(placement)},
        )

    def stages_of(self, count: int) -> tuple[StageDemands, ...]:
        """What the schedule and the policy ask of each of `count` workers, if each has one process.

        Raises:
            ScheduleError, PolicyError: an unknown name, or one that cannot have so many workers.
        """
        return _known_stages(self, count)

    def worker_in(self, slot: Slot, stage: StageDemands) -> tuple[Workers, int]:
        """A worker of which the schedule asks this, between one worker that stands for all before it and one that
        stands for all after it; and its number among these workers, 0 or 1."""
        replicas = tuple(count for count in slot if count)
        return self._of([stage] * len(replicas), replicas), int(slot.before > 0)

    def held_in(self, slot: Slot, stage: StageDemands) -> tuple[int, int, int]:
        """The most microbatches of a replica: that it holds, that are between B and W, and for which it holds what the
        worker before it saved.

        In 1F1B, worker k of N holds N − k microbatches, so that each worker from it on has one. If these workers have
        more processes, it holds more in proportion, and its replicas share them. With a flush, a replica holds at most
        its own microbatches of a minibatch.
        """
        alone, most, left = stage.depth * slot.own, -(-self.microbatches // slot.own), slot.own + slot.after
        counts = (stage.held * left, stage.deferred * left, stage.held * sum(slot))
        shares = (-(-count // alone) for count in counts)
        held, deferred, before = (min(share, most) if stage.flush else share for share in shares)
        return held, deferred, before

    def _stages(self, schedule: Schedule) -> tuple[StageDemands, ...]:
        policy = make_policy(self.policy or default_for(schedule))
        weight, gradient, count = 1.0, 1.0, schedule.workers
        same = self.optimizer_bytes + self.outer_bytes
        kept, work = copies(policy, schedule), seconds_per_owned_byte(policy, schedule, self.policy_times)
        fullest = [moments(schedule, k) for k in range(count)]
        return tuple(
            StageDemands(
                weight + gradient + same + kept[k],
                1e3 * work[k],
                count - k,
                max(map(sum, fullest[k])),
                max(later for _, later in fullest[k]),
                schedule.synchronous,
            )
            for k in range(count)
        )

    def _replicated(self, schedule: Schedule, replicas: tuple[int, ...]) -> Workers:
        if schedule.several:
            raise CutError(
                f"schedule '{self.schedule}' has several workers in each process, so they cannot have replicas",
                hint="take a schedule with one worker in each process: async, 1f1b, gpipe",
            )
        if max(replicas) > self.microbatches:
            raise CutError(
                f"{max(replicas)} replicas of a worker cannot share {self.microbatches} microbatches",
                hint="give as many microbatches as there are replicas, or more",
            )
        return self._of(_known_stages(self, schedule.workers), replicas)

    def _of(self, stages: Sequence[StageDemands], replicas: tuple[int, ...]) -> Workers:
        """Workers with replicas."""
        for name, values in (("speeds", self.speeds), ("memory", self.memory)):
            if len(set(values)) > 1:
                raise CutError(f"the {name} of processes differ", hint="replicas need equal processes")
        count = len(stages)
        slots = [Slot(sum(replicas[:k]), replicas[k], sum(replicas[k + 1 :])) for k in range(len(replicas))]
        workers = Workers(
            count,
            speeds=self.speeds[:1] * count,
            memory=self.memory[:1] * count,
            owned_factor=tuple(stage.owned_factor for stage in stages),
            owned_ms=tuple(stage.owned_ms for stage in stages),
            replicas=replicas,
            **self.shared | {"dp": 1},
        )
        held = [self.held_in(slot, stage) for slot, stage in zip(slots, stages, strict=True)]
        in_flight, deferred, before = zip(*held, strict=True)
        return replace(workers, in_flight=in_flight, deferred=deferred, in_flight_before=before)


@lru_cache(maxsize=64)
def _known_stages(setting: Setting, count: int) -> tuple[StageDemands, ...]:
    """`Setting.stages_of`, kept, since following a schedule with many workers takes a while."""
    return setting._stages(replace(setting, replicas=()).schedule_of(count))


def _shares(placement: Sequence[int], in_flight: Sequence[int]) -> list[float]:
    """Each worker's share of its rank's memory."""
    of_ranks = [0] * (max(placement) + 1)
    for rank, count in zip(placement, in_flight, strict=True):
        of_ranks[rank] += count
    return [
        0.5 / placement.count(rank) + 0.5 * count / of_ranks[rank]
        for rank, count in zip(placement, in_flight, strict=True)
    ]


def _for(count: int, values: tuple[float, ...]) -> tuple[float, ...]:
    """The values, or `count` copies of one if they are all equal."""
    return values[:1] * count if len(set(values)) == 1 else values
