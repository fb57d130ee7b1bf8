"""Plans whose workers have an order of their own, simulated; the order is made anew for every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite

from fxpipe.plan.spec import PHASES, Phase
from fxpipe.planner.partition import Partition, of_cuts
from fxpipe.planner.search import EPSILON
from fxpipe.planner.workers import Workers
from fxpipe.schedule import ZeroBubbleH1, ZeroBubbleH2
from fxpipe.schedule.csv_rows import NAME
from fxpipe.search.candidate import Candidate, Question, Sized
from fxpipe.search.own_order import MANNERS, ListingManner, Rows, StageTimes, improved, most_held, orders, run
from fxpipe.search.simulated_plan import Cut, Judge, SimulatedPlan
from fxpipe.simulator.of_partition import scenario_of_partition
from fxpipe.simulator.scenario import Scenario

ALL_MANNERS = 60
"""Of that many actions or fewer, an order is listed in every manner for every plan."""

KEPT_MANNERS = 8
"""Of more, in those alone that were best for the first plan."""

STARTS = 4
"""How many orders of a plan are improved."""

EFFORT = 12_000
"""Actions that are run in all to improve the orders of one plan."""

LAST_EFFORT = 300_000
"""The same for one plan that is among the best."""

SHAKES = 30
"""How often the order of such a plan is disturbed, at most."""


@dataclass(frozen=True)
class OwnOrders(Judge):
    """Simulates plans with an order of each worker's own; each worker has its rank, and weight gradients are apart.

    Attributes:
        setting, workers: those of ZB-H1, which trains the same; it has no say in the order.
    """

    _manners: list[ListingManner] = field(default_factory=lambda: list(MANNERS))

    @cached_property
    def _named(self) -> list[Rows]:
        """The orders that have names."""
        kinds = (ZeroBubbleH1, ZeroBubbleH2)
        schedules = [kind(self.workers.count, self.sized.microbatches) for kind in kinds]
        return [
            [[(action.phase, action.microbatch) for action in schedule.until(k, 1)] for k in range(schedule.workers)]
            for schedule in schedules
        ]

    @staticmethod
    def of(candidate: Candidate, sized: Sized, question: Question) -> OwnOrders:
        """For as many workers as there are processes.

        Raises:
            PolicyError: the policy makes no sense with a flush.
        """
        setting = question.setting(sized, ZeroBubbleH1.name)
        return OwnOrders(candidate, sized, setting, sized.apart, setting.workers(question.workers))

    def of_cuts(
        self, like: Partition, forward: Cut, backward: Cut, weights: Cut, send: bool = False
    ) -> SimulatedPlan | None:
        return self._ordered((forward, backward, weights), () if send else like.recompute, EFFORT)

    def better(self, trial: SimulatedPlan) -> SimulatedPlan:
        """The same cuts with an order that was improved for longer, if that is faster."""
        p = trial.partition
        found = self._ordered((p.forward, p.backward, p.weights), p.recompute, LAST_EFFORT, SHAKES)
        return found if found is not None and found.seconds < trial.seconds else trial

    def _ordered(
        self, cuts: tuple[Cut, Cut, Cut], again: Sequence[tuple[int, int, int]], effort: int, shakes: int = 0
    ) -> SimulatedPlan | None:
        """What cuts do with the best order that listing and improving finds; None if they do not fit into memory."""
        count, microbatches = self.workers.count, self.sized.microbatches
        held = self._held(cuts, again)
        if min(held) < 1:
            return None
        one = self._priced(cuts, again, self._holding(1))
        schedule = self.setting.schedule_of(count)
        times = times_of(scenario_of_partition(self.profile, one, self.workers, schedule), microbatches, held)
        pairs = orders(times, self._manners)
        if times.actions > ALL_MANNERS and len(self._manners) > KEPT_MANNERS:
            self._manners[:] = [manner for _, manner in pairs[:KEPT_MANNERS]]
        starts = [order for order, _ in pairs] + [run(times, rows) for rows in self._named if fits(rows, held)]
        starts.sort(key=lambda order: (order.seconds, order.later))
        best = improved(times, starts[:STARTS], effort // times.actions, shakes)
        setting = replace(self.setting, schedule=NAME, rows=lines_of(best.rows))
        workers = setting.workers(count)
        partition = self._priced(cuts, again, workers)
        if not isfinite(partition.bottleneck):
            return None
        return Judge(self.candidate, self.sized, setting, self.profile, workers).trial(partition)

    def _priced(self, cuts: tuple[Cut, Cut, Cut], again: Sequence[tuple[int, int, int]], workers: Workers) -> Partition:
        costs = self.costs.with_workers(workers)
        return of_cuts(self.profile, workers, *cuts, recompute=again, mode=self.candidate.mode, costs=costs)

    def _holding(self, held: int) -> Workers:
        """The workers, if each held so many microbatches, had room for them, and computed nothing again for it."""
        count = self.workers.count
        return replace(
            self.workers, in_flight=(held,) * count, deferred=(0,) * count, memory=(inf,) * count, recompute="none"
        )

    def _held(self, cuts: tuple[Cut, Cut, Cut], again: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
        """How many microbatches each worker has room for: what it holds grows evenly with them.

        Where it may compute values again to have more room, at least as many as ZB-H1 holds.
        """
        most = self.sized.microbatches
        if all(memory == inf for memory in self.workers.memory):
            return (most,) * self.workers.count
        one, full = (self._priced(cuts, again, self._holding(held)).loads for held in (1, most))
        found = []
        for k, memory in enumerate(self.workers.memory):
            room = memory * (1 + EPSILON) - one[k].memory
            each = (full[k].memory - one[k].memory) / max(1, most - 1)
            held = 0 if room < 0 else most if room >= each * (most - 1) else 1 + int(room / each)
            found.append(held if self.workers.recompute == "none" else max(held, self.workers.in_flight[k]))
        return tuple(found)


def fits(rows: Rows, held: Sequence[int]) -> bool:
    """Whether no worker holds more microbatches than it has room for."""
    return all(most_held(row) <= most for row, most in zip(rows, held, strict=True))


def times_of(scenario: Scenario, microbatches: int, held: tuple[int, ...]) -> StageTimes:
    """The times that a scenario's workers take, with messages between neighbours, and weights.

    What else they send, as saved values for a backward elsewhere, is left out: the simulator knows it.
    """
    count = len(scenario.workers)
    copied = [[0.0, 0.0, 0.0] for _ in range(count)]
    for m in scenario.messages:
        for worker, phase in ((m.src, m.src_phase), (m.dst, m.dst_phase)):
            copied[worker][PHASES.index(phase)] += scenario.links.copy * m.bytes
    spent = [
        tuple(cost.seconds(phase) + more for phase, more in zip(PHASES, own, strict=True))
        for cost, own in zip(scenario.workers, copied, strict=True)
    ]
    return StageTimes(
        microbatches,
        tuple((f, b, w) for f, b, w in spent),
        tuple(cost.update for cost in scenario.workers),
        tuple(_way(scenario, k, k + 1, "F") for k in range(count - 1)),
        tuple(_way(scenario, k + 1, k, "B") for k in range(count - 1)),
        held,
        tuple(
            (
                r.owner,
                r.reader,
                phase,
                scenario.links.seconds(r.owner, r.reader, r.bytes) + scenario.links.latency_of(r.owner, r.reader),
            )
            for r in scenario.weight_copies
            for phase, _ in r.reads
        ),
    )


def _way(scenario: Scenario, source: int, target: int, phase: Phase) -> float:
    """Seconds from the end of a phase on a worker to when a neighbour can begin with it, and need not wait within."""
    links, last = scenario.links, 0.0
    before, after = (scenario.workers[k].seconds(phase) for k in (source, target))
    found = links.latency_of(source, target)  # of the empty message that keeps the order, where there is no other
    own = [m for m in scenario.messages if (m.src, m.src_phase, m.dst, m.dst_phase) == (source, phase, target, phase)]
    for place, m in enumerate(sorted(own, key=lambda m: m.made)):
        made = (m.made - 1) * before
        last = max(last, made) if place else made
        last += links.seconds(source, target, m.bytes)
        arrived = last + links.latency_of(source, target) - m.needed * after
        found = max(found, arrived) if place else arrived
    return max(0.0, found)


def lines_of(rows: Rows) -> tuple[str, ...]:
    """Rows as those of a plan, of a worker on each rank."""
    of = {"F": "F", "B": "I", "W": "W"}
    return tuple(",".join(f"{k}{of[phase]}{number}" for phase, number in row) for k, row in enumerate(rows))
