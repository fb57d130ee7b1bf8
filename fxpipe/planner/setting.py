"""What a schedule and a policy ask of devices: microbatches in flight, memory and time for each byte of weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpipe.plan.cost_records import PolicyTimes
from fxpipe.planner.links import Links
from fxpipe.planner.workers import Ratios, Recomputation, Workers
from fxpipe.policy import copies, default_for
from fxpipe.policy import make as make_policy
from fxpipe.policy.work import seconds_per_owned_byte
from fxpipe.schedule import make
from fxpipe.schedule.check import held, moments

MOMENTUM = 1.0
"""The default bytes of optimizer state for each byte of weights: SGD with momentum."""


@dataclass(frozen=True)
class Setting:
    """What a profile is planned for, with any number of workers.

    Attributes:
        schedule, policy, microbatches: decide what each worker holds; None means the schedule's default policy.
        links: None means that messages are free.
        speeds, memory: of each worker; empty means equal and without limit.
        optimizer_bytes: of the optimizer's state, for each byte of weights.
        policy_times: of what policies do to weights.
        ratios: of what travels, where codecs pack it.
        recompute: what backwards may compute again to save memory.
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
    recompute: Recomputation = "none"

    def workers(self, count: int) -> Workers:
        """`count` of these workers. Their number may differ from that of the speeds and memories only if those are all
        equal.

        Raises:
            ScheduleError, PolicyError: an unknown name.
            CutError: speeds, memories or links for another number of workers.
        """
        schedule = make(self.schedule, count, self.microbatches)
        policy = make_policy(self.policy or default_for(schedule))
        weight, gradient = 1.0, 1.0
        kept = copies(policy, schedule)
        return Workers(
            count,
            speeds=_for(count, self.speeds),
            memory=_for(count, self.memory),
            links=self.links,
            microbatches=self.microbatches,
            in_flight=held(schedule),
            owned_factor=tuple(weight + gradient + self.optimizer_bytes + count for count in kept),
            owned_ms=tuple(1e3 * s for s in seconds_per_owned_byte(policy, schedule, self.policy_times)),
            ratios=self.ratios,
            deferred=tuple(max(later for _, later in moments(schedule, k)) for k in range(count)),
            recompute=self.recompute,
        )


def _for(count: int, values: tuple[float, ...]) -> tuple[float, ...]:
    """The values themselves if there are that many; else that many copies of the one value they all have."""
    return values[:1] * count if len(set(values)) == 1 else values
