"""What is compared: schedules, numbers of microbatches, kinds of cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpipe.errors import ScheduleError
from fxpipe.planner.candidates import PINNED
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.profile import Profile
from fxpipe.planner.setting import Setting
from fxpipe.policy import default_for
from fxpipe.policy import make as make_policy
from fxpipe.schedule import SCHEDULES, kind_of, make
from fxpipe.schedule.base import divisors

SIZES = 3
"""How many numbers of microbatches are tried first if none is given: each is captured and measured separately."""


@dataclass(frozen=True)
class Sized:
    """A minibatch cut into some number of microbatches.

    Attributes:
        setting: what it is planned for, with that number of microbatches; its schedule and policy do not count here.
        whole: what its units cost, with W in B.
        separate: the same where W has cuts or actions of its own.
        samples: of a minibatch; None for a profile, whose microbatches have one size, whatever their number.
        fixed: the cuts, if they are given.
    """

    setting: Setting
    whole: Profile
    separate: Profile
    samples: int | None = None
    fixed: Cuts | None = None

    @property
    def microbatches(self) -> int:
        """Of a minibatch."""
        return self.setting.microbatches

    def share(self, seconds: float) -> float:
        """Seconds of a minibatch, comparable with those of other numbers of microbatches."""
        return seconds if self.samples is not None else seconds / self.microbatches


@dataclass(frozen=True)
class Candidate:
    """A minibatch of some number of microbatches under a schedule, with a kind of cuts."""

    sized: Sized
    schedule: str
    mode: str

    @property
    def microbatches(self) -> int:
        """Of a minibatch."""
        return self.sized.microbatches

    @property
    def profile(self) -> Profile:
        """What the units cost under the schedule with this kind of cuts."""
        apart = self.mode == "three-way" or kind_of(self.schedule).weights_apart
        return self.sized.separate if apart else self.sized.whole


@dataclass(frozen=True)
class Question:
    """What is searched.

    Attributes:
        workers: how many processes.
        policy: for all schedules; None takes each schedule's default.
        momentum: of every group of the optimizer; it decides the default policy.
        modes: the kinds of cuts; if empty, all that are of use to each schedule.
        virtual: how many workers each process runs; None takes each schedule's own number.
    """

    workers: int
    schedules: tuple[str, ...]
    policy: str | None = None
    momentum: bool = False
    modes: tuple[str, ...] = ()
    virtual: int | None = None

    def placement(self, schedule: str) -> tuple[int, ...] | None:
        """The rank of each worker under a schedule; None if a rank cannot have that many."""
        try:
            return kind_of(schedule).usual_placement(self.workers, self.virtual)
        except ScheduleError:
            return None

    def setting(self, sized: Sized, schedule: str) -> Setting:
        """What a schedule is planned for.

        Raises:
            PolicyError: the policy makes no sense with it.
        """
        placement = self.placement(schedule)
        assert placement is not None
        concrete = make(schedule, len(placement), sized.microbatches, placement)
        policy = make_policy(self.policy or default_for(concrete, self.momentum))
        policy.check(concrete)
        placement = placement if concrete.several else ()
        return replace(sized.setting, schedule=schedule, policy=str(policy), placement=placement)


def candidates(question: Question, sized: Sized) -> list[Candidate]:
    """All candidates with one number of microbatches.

    They include three-way cuts if the schedule has separate weight gradients: then such cuts cost no waiting.
    """
    compared = []
    for schedule in question.schedules:
        placement = question.placement(schedule)
        if placement is None or (len(placement) > question.workers and _too_many(len(placement), sized)):
            continue
        modes = question.modes or ("same", "bidirectional")
        if not question.modes and kind_of(schedule).weights_apart:
            modes = (*modes, "three-way")
        if sized.fixed is not None:
            modes = (PINNED,)
        compared += [Candidate(sized, schedule, mode) for mode in modes]
    return compared


def _too_many(stages: int, sized: Sized) -> bool:
    """Whether the step cannot be cut into that many stages, or is already cut into fewer."""
    return stages > len(sized.whole.units) or (sized.fixed is not None and sized.fixed.workers != stages)


def counted(microbatches: int) -> str:
    """`1 microbatch`, `4 microbatches`."""
    return f"{microbatches} microbatch{'' if microbatches == 1 else 'es'}"


def schedules_of(synchronous: bool) -> tuple[str, ...]:
    """The names of all schedules, or of those that train exactly as one worker does; simpler ones first.

    Schedules with late updates are left out: they only gain from sums over replicas, which a search does not time.
    """
    kinds = ((name, kind) for name, kind in SCHEDULES.items() if not kind.late)
    return tuple(name for name, kind in kinds if kind.synchronous or not synchronous)


@dataclass(frozen=True)
class Counts:
    """The numbers of microbatches to try.

    Attributes:
        first: those that are always tried, in rising order.
        samples: what larger numbers must divide; None if no others are tried.
    """

    first: tuple[int, ...]
    samples: int | None = None

    def after(self, count: int) -> int | None:
        """The next number to try if this one is the fastest, at least twice as large; None if there is none."""
        if self.samples is None:
            return None
        return next((d for d in divisors(self.samples) if d >= 2 * max(count, *self.first)), None)


def microbatch_counts(workers: int, samples: int, schedules: Sequence[str]) -> Counts:
    """The numbers of microbatches to try; all divide `samples`.

    At first at most `SIZES`: each schedule's default, then about two and four for each worker,
    which leave bubbles of about a third and a fifth of the time to schedules with a flush.
    """
    counts = divisors(samples)
    usual = [kind_of(name).usual_microbatches(workers, samples) for name in schedules]
    more = [min((d for d in counts if d >= times * workers), default=counts[-1]) for times in (2, 4)]
    return Counts(tuple(sorted(list(dict.fromkeys([*usual, *more]))[:SIZES])), samples)
