"""What a build does with its number of microbatches, and would do with others, by the costs that it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

from fxpipe.errors import PolicyError
from fxpipe.inspection.staleness import Staleness, ago, staleness_of
from fxpipe.ir.program_table import ProgramTable
from fxpipe.observe.record import samples_of
from fxpipe.plan.spec import Phase, Plan
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.device import LAUNCH
from fxpipe.planner.quantity import size
from fxpipe.policy.recipe import choose
from fxpipe.schedule.base import divisors
from fxpipe.simulator.memory import peak_bytes
from fxpipe.simulator.of_build import scenario_of
from fxpipe.simulator.scenario import Scenario
from fxpipe.simulator.simulate import simulate, steady_minibatches

if TYPE_CHECKING:
    from fxpipe.build.build import Build


@dataclass(frozen=True)
class Prospect:
    """One number of microbatches.

    Attributes:
        samples_per_second: in the steady state, as simulated.
        memory_bytes: of the worker that holds most at once (`fxpipe/simulator/memory.py`).
    """

    microbatches: int
    staleness: Staleness
    samples_per_second: float
    memory_bytes: float

    def __str__(self) -> str:
        age = f"{ago(self.staleness.updates)} old" if self.staleness.updates else "not stale"
        return f"{self.microbatches}: {age}, {self.samples_per_second:.1f} samples/s, {size(self.memory_bytes)}"


def own_and_others(build: Build) -> tuple[Prospect, ...]:
    """A build's own number of microbatches first; then one, and about half and twice as many.

    Empty if it does not know its costs, or its policy is defined in a model file that is not imported here.
    """
    plan = build.plan
    if build.nodes is None or not build.costs.workers:
        return ()
    shared = lcm(*plan.replicas) if plan.crossing else 1
    known = [count for count in divisors(samples_of(plan) // plan.dp) if count % shared == 0]
    fewer = [d for d in known if 2 * d <= plan.own_microbatches]
    more = [d for d in known if d >= 2 * plan.own_microbatches]
    others = dict.fromkeys([] if plan.rows else [*known[:1], *fewer[-1:], *more[:1]])  # a file has its own number
    counts = [plan.own_microbatches, *(count for count in others if count != plan.own_microbatches)]
    return tuple(prospects(plan, build.costs, build.nodes, counts))


def prospects(plan: Plan, costs: BuildCosts, nodes: ProgramTable, counts: Sequence[int]) -> Iterator[Prospect]:
    """What a plan does with these numbers of microbatches, cut where it is cut; what its policy refuses is left out.

    A node's time is taken to grow in proportion to the microbatch above `LAUNCH`, the least that a node takes; messages
    and saved values grow likewise. `fxpipe plan --microbatches` captures and measures each number instead.

    Args:
        nodes: says how many nodes a worker runs, and what each costs.
    """
    least = _least_times(nodes)
    for count in counts:
        other = replace(plan, microbatches=count * plan.dp)
        try:
            recipe = choose(other)
        except PolicyError:
            continue
        scenario = _resized(scenario_of(other, costs, recipe.demand), least, plan.own_microbatches / count)
        simulation = simulate(recipe.schedule, scenario, steady_minibatches(recipe.schedule))
        memory = max(peak_bytes(other, costs, recipe.demand, plan.own_microbatches / count))
        yield Prospect(
            count,
            staleness_of(recipe.policy, recipe.demand.versions),
            simulation.samples_per_second(samples_of(plan)),
            memory,
        )


def _least_times(nodes: ProgramTable) -> dict[tuple[int, Phase | None], float]:
    """The seconds of each worker's phase that do not depend on the size of the microbatch."""
    least: dict[tuple[int, Phase | None], float] = {}
    for row in nodes.rows:
        least[row.worker, row.phase] = least.get((row.worker, row.phase), 0.0) + min(LAUNCH, (row.ms or 0.0) / 1e3)
    return least


def _resized(scenario: Scenario, least: dict[tuple[int, Phase | None], float], ratio: float) -> Scenario:
    """The same with microbatches of another size."""

    def time(seconds: float, worker: int, phase: Phase) -> float:
        fixed = min(seconds, least.get((worker, phase), 0.0))
        return fixed + ratio * (seconds - fixed)

    workers = tuple(
        replace(
            w,
            forward=time(w.forward, k, "F"),
            backward=time(w.backward, k, "B"),
            weight=time(w.weight, k, "W"),
            saved_bytes=ratio * w.saved_bytes,
            deferred_bytes=ratio * w.deferred_bytes,
        )
        for k, w in enumerate(scenario.workers)
    )
    return replace(
        scenario,
        workers=workers,
        messages=tuple(replace(message, bytes=ratio * message.bytes) for message in scenario.messages),
    )
