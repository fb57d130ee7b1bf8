"""Plans whose workers have an order of their own, simulated; the order is made anew for every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from fxpipe.plan.spec import PHASES, Phase
from fxpipe.planner.partition import Partition, of_cuts
from fxpipe.planner.search import EPSILON
from fxpipe.planner.workers import Workers
from fxpipe.schedule import ZeroBubbleH1
from fxpipe.schedule.csv_rows import NAME
from fxpipe.search.candidate import Candidate, Question, Sized
from fxpipe.search.own_order import MANNERS, Manner, Rows, Times, improved, orders
from fxpipe.search.simulated_plan import Cut, Judge, SimulatedPlan
from fxpipe.simulator.of_partition import scenario_of_partition
from fxpipe.simulator.scenario import Scenario

ALL_MANNERS = 100
"""Of that many actions or fewer, an order is listed in every manner for every plan."""

KEPT_MANNERS = 8
"""Of more, in those alone that were best for the first plan."""

STARTS = 4
"""How many orders of a plan are improved."""

EFFORT = 60_000
"""Actions that are run in all to improve the orders of one plan."""

LAST_EFFORT = 1_000_000
"""The same for one plan that is among the best."""

SHAKES = 200
"""How often the order of such a plan is disturbed, at most."""


@dataclass(frozen=True)
class OwnOrders(Judge):
    """Simulates plans with an order of each worker's own; each worker has its rank, and weight gradients are apart.

    Attributes:
        setting, workers: those of ZB-H1, which trains the same; it has no say in the order.
    """

    _manners: list[Manner] = field(default_factory=lambda: list(MANNERS))

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
        one, all_of_them = (self._priced(cuts, again, self._holding(held)) for held in (1, microbatches))
        held = self._held(one, all_of_them)
        if min(held) < 1 or not isfinite(one.bottleneck):
            return None
        schedule = self.setting.schedule_of(count)
        times = times_of(scenario_of_partition(self.profile, one, self.workers, schedule), microbatches, held)
        pairs = orders(times, self._manners)
        if times.actions > ALL_MANNERS and len(self._manners) > KEPT_MANNERS:
            self._manners[:] = [manner for _, manner in pairs[:KEPT_MANNERS]]
        best = improved(times, [order for order, _ in pairs[:STARTS]], effort // times.actions, shakes)
        setting = replace(self.setting, schedule=NAME, rows=lines_of(best.rows))
        workers = setting.workers(count)
        partition = self._priced(cuts, again, workers)
        if not isfinite(partition.bottleneck):
            return None
        return Judge(self.candidate, self.sized, setting, self.profile, workers).trial(partition)

    def _priced(self, cuts: tuple[Cut, Cut, Cut], again: Sequence[tuple[int, int, int]], workers: Workers) -> Partition:
        costs = self.costs.of_workers(workers)
        return of_cuts(self.profile, workers, *cuts, recompute=again, mode=self.candidate.mode, costs=costs)

    def _holding(self, held: int) -> Workers:
        """The workers, if each holds so many microbatches."""
        return replace(self.workers, in_flight=(held,) * self.workers.count, deferred=(held - 1,) * self.workers.count)

    def _held(self, one: Partition, all_of_them: Partition) -> tuple[int, ...]:
        """How many microbatches each worker has room for: what it holds grows evenly with them.

        Where a worker may compute values again to have more room, as many as ZB-H1 holds: what it gains from more is
        not worth what it computes.
        """
        most = self.sized.microbatches
        if self.workers.recompute != "none":
            return tuple(min(most, held) for held in self.workers.in_flight)
        found = []
        for least, full, memory in zip(one.loads, all_of_them.loads, self.workers.memory, strict=True):
            room, each = memory * (1 + EPSILON) - least.memory, (full.memory - least.memory) / max(1, most - 1)
            found.append(0 if room < 0 else most if room >= each * (most - 1) else 1 + int(room / each))
        return tuple(found)


def times_of(scenario: Scenario, microbatches: int, held: tuple[int, ...]) -> Times:
    """The times that a scenario's workers take, with messages between neighbours.

    What else they send is left out: it is needed later, and the simulator knows it.
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
    return Times(
        microbatches,
        tuple((f, b, w) for f, b, w in spent),
        tuple(cost.update for cost in scenario.workers),
        tuple(_way(scenario, k, k + 1, "F") for k in range(count - 1)),
        tuple(_way(scenario, k + 1, k, "B") for k in range(count - 1)),
        held,
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
