"""One plan under one schedule, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

from fxpipe.planner.branches import graph_of_cuts
from fxpipe.planner.cost_model import CostModel
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.links import Links
from fxpipe.planner.partition import Partition, of_all_cuts, of_cuts
from fxpipe.planner.profile import Profile
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Workers
from fxpipe.policy import make as make_policy
from fxpipe.policy.costs import delay
from fxpipe.schedule import Schedule
from fxpipe.schedule.graph import Graph
from fxpipe.schedule.versions import versions_of
from fxpipe.search.candidate import Candidate, Question
from fxpipe.simulator.of_partition import scenario_of_partition
from fxpipe.simulator.scenario import Scenario
from fxpipe.simulator.simulate import Simulation, simulate, steady_minibatches

ThreeCuts = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Of forward, backward and weight gradients."""


@dataclass(frozen=True)
class SimulatedPlan:
    """A partition that fits into memory, and what it does under its candidate's schedule: a trial.

    Attributes:
        setting: the schedule, its policy, and what it was planned for.
    """

    candidate: Candidate
    setting: Setting
    partition: Partition
    scenario: Scenario
    simulation: Simulation
    graph: Graph = ()

    @property
    def seconds(self) -> float:
        """Of a minibatch, in the steady state."""
        return self.simulation.seconds_per_minibatch

    @property
    def pace(self) -> float:
        """The same, comparable with trials of other numbers of microbatches."""
        return self.candidate.sized.share(self.seconds)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each worker."""
        return self.schedule.placement

    @property
    def cuts(self) -> ThreeCuts:
        """Of its partition, whatever is recomputed."""
        return self.partition.forward, self.partition.backward, self.partition.weights

    @property
    def memory(self) -> float:
        """Bytes of the process that holds most."""
        of_ranks = [0.0] * self.schedule.ranks
        for rank, load in zip(self.schedule.placement, self.partition.loads, strict=True):
            of_ranks[rank] += load.memory
        return max(of_ranks)

    @cached_property
    def schedule(self) -> Schedule:
        """Its schedule."""
        return self.setting.schedule_of(len(self.partition.loads)).along(self.graph)

    @cached_property
    def staleness(self) -> int:
        """How many updates a forward misses at most."""
        schedule = self.schedule
        if schedule.synchronous:
            return 0
        policy, versions = make_policy(self.setting.policy or ""), versions_of(schedule)
        return max(delay(policy, versions, worker) for worker in range(schedule.workers))

    @cached_property
    def busy(self) -> float:
        """Seconds of a minibatch in which a process computes, updates or copies, on average."""
        workers, microbatches = len(self.scenario.workers), self.setting.microbatches
        return sum(self.scenario.busy(worker, microbatches) for worker in range(workers)) / self.schedule.ranks

    @property
    def least(self) -> float:
        """About the least that any cuts take, as `pace`: no process waits, and nothing is computed again."""
        again = self.setting.microbatches * sum(load.recompute for load in self.partition.loads)
        return self.candidate.sized.share(self.busy - again / self.schedule.ranks)

    @cached_property
    def waits_for_links(self) -> float:
        """Seconds that links add to a minibatch: what it would save if messages took no time on the way."""
        return max(0.0, self.seconds - self.seconds_over(Links(copy=self.scenario.links.copy)))

    def seconds_over(self, links: Links) -> float:
        """Of a minibatch, over other links between its processes."""
        links = links.on(self.placement)
        if links == self.scenario.links:
            return self.seconds
        scenario = replace(self.scenario, links=links)
        return simulate(self.schedule, scenario, steady_minibatches(self.schedule)).seconds_per_minibatch


@dataclass(frozen=True)
class Judge:
    """Simulates plans of one candidate.

    Attributes:
        setting, workers: what its schedule makes of the setting and of the workers.
    """

    candidate: Candidate
    setting: Setting
    workers: Workers

    @property
    def profile(self) -> Profile:
        """What the units cost."""
        return self.candidate.profile

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each worker."""
        return self.setting.schedule_of(self.workers.count).placement

    @cached_property
    def costs(self) -> CostModel:
        """What cuts cost, by the planner."""
        return CostModel(self.profile, self.workers)

    @staticmethod
    def of(candidate: Candidate, question: Question) -> Judge:
        """A judge of one candidate, with the workers that its schedule has.

        Raises:
            PolicyError: the policy makes no sense with it.
        """
        setting = question.setting(candidate.sized, candidate.schedule)
        placement = question.placement(candidate.schedule)
        assert placement is not None
        return Judge(candidate, setting, setting.workers(len(placement)))

    def workers_of(self, cuts: Cuts) -> Workers:
        """The workers, with the graph that they have with these cuts, so that they hold what that needs."""
        graph = graph_of_cuts(self.profile, cuts)
        return self.setting.workers(self.workers.count, graph=graph) if graph else self.workers

    def trial(self, partition: Partition) -> SimulatedPlan:
        """The trial of a partition that fits."""
        graph = graph_of_cuts(self.profile, partition.cuts)
        schedule = self.setting.schedule_of(self.workers.count).along(graph)
        if graph:
            priced = of_cuts(self.profile, self.workers_of(partition.cuts), partition.cuts, mode=partition.mode)
            partition = replace(priced, lower_bound=min(partition.lower_bound, priced.bottleneck))
        scenario = scenario_of_partition(self.profile, partition, self.workers, schedule)
        simulation = simulate(schedule, scenario, steady_minibatches(schedule))
        return SimulatedPlan(self.candidate, self.setting, partition, scenario, simulation, graph)

    def of_cuts(self, cuts: Sequence[Cuts]) -> Iterator[SimulatedPlan | None]:
        """The trials of other cuts, each when it is asked for; None if they do not fit into memory."""
        for partition in of_all_cuts(self.costs, cuts, self.candidate.mode):
            yield self.trial(partition) if isfinite(partition.bottleneck) else None
