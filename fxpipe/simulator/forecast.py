"""What a build will do when it runs, by all that its compile knew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from fxpipe.planner.links import Links
from fxpipe.policy.recipe import Recipe, choose
from fxpipe.simulator.model import Scenario
from fxpipe.simulator.of_build import Costed, WorkerTimes, scenario_of
from fxpipe.simulator.result import Simulation
from fxpipe.simulator.simulate import simulate, steady_minibatches

if TYPE_CHECKING:
    from fxpipe.plan.costs import EdgeTiming


class Timed(Costed, Protocol):
    """What of a build says what it will do."""

    @property
    def times(self) -> Sequence[WorkerTimes]: ...
    @property
    def timings(self) -> Sequence[EdgeTiming]: ...
    @property
    def links(self) -> Links: ...


def forecast(
    build: Timed, *, schedule: str | None = None, policy: str | None = None, links: Links | None = None
) -> Simulation:
    """Simulate a build: with its stages' measured times where it has them, on the links it was planned for.

    Args:
        schedule, policy: the build's own where None.
        links: others than it was planned for.

    Raises:
        BuildError: a loaded build without `costs.json`.
    """
    return expect(build, choose(build.plan, schedule, policy), links)[1]


def expect(build: Timed, recipe: Recipe, links: Links | None = None) -> tuple[Scenario, Simulation]:
    """What `forecast` simulates, and the simulation, of a build that is run by a recipe.

    Raises:
        BuildError: as `forecast`.
    """
    scenario = scenario_of(build, links or build.links, build.timings, build.times or None, demand=recipe.demand)
    return scenario, simulate(recipe.schedule, scenario, steady_minibatches(recipe.schedule))
