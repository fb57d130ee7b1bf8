"""What a build will do when it runs, by all that its compile knew."""

from __future__ import annotations

import dataclasses

from fxpipe.plan.spec import Plan
from fxpipe.planner.build_costs import BuildCosts
from fxpipe.planner.links import Links
from fxpipe.policy.recipe import Recipe, choose
from fxpipe.simulator.model import Scenario
from fxpipe.simulator.of_build import scenario_of
from fxpipe.simulator.result import Simulation
from fxpipe.simulator.simulate import simulate, steady_minibatches


def forecast(
    plan: Plan, costs: BuildCosts, *, schedule: str | None = None, policy: str | None = None, links: Links | None = None
) -> Simulation:
    """Simulate a build: with its stages' measured times where it has them, on the links it was planned for.

    Args:
        schedule, policy: the build's own where None.
        links: others than it was planned for.

    Raises:
        BuildError: the costs are empty: those of a loaded build without `costs.json`.
    """
    return expect(plan, dataclasses.replace(costs, links=links or costs.links), choose(plan, schedule, policy))[1]


def expect(plan: Plan, costs: BuildCosts, recipe: Recipe) -> tuple[Scenario, Simulation]:
    """What `forecast` simulates, and the simulation, of a build that is run by a recipe.

    Raises:
        BuildError: as `forecast`.
    """
    scenario = scenario_of(plan, costs, recipe.demand)
    return scenario, simulate(recipe.schedule, scenario, steady_minibatches(recipe.schedule))
