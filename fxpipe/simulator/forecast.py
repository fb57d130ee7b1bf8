"""Forecasts a run of a build from the costs that the compile knew."""

from __future__ import annotations

import dataclasses

from fxpipe.plan.spec import Plan
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.links import Links
from fxpipe.policy.recipe import Recipe, choose
from fxpipe.schedule import Async, AsyncLate
from fxpipe.simulator.of_build import scenario_of
from fxpipe.simulator.scenario import Scenario
from fxpipe.simulator.simulate import Simulation, simulate, steady_minibatches


def forecast(
    plan: Plan, costs: BuildCosts, *, schedule: str | None = None, policy: str | None = None, links: Links | None = None
) -> Simulation:
    """Simulate a build on the links it was planned for, with the measured times of its stages if it has them.

    Args:
        schedule, policy: None means the build's own.
        links: to use instead.

    Raises:
        BuildError: the costs are empty, as in a loaded build without `costs.json`.
    """
    return expect(plan, dataclasses.replace(costs, links=links or costs.links), choose(plan, schedule, policy))[1]


LEAST = 0.98
"""A schedule with late updates is worth its staleness if its time is at most this share of the other schedule's."""


def late_instead(plan: Plan, costs: BuildCosts, seconds: float) -> tuple[str, float] | None:
    """A schedule with late updates that is faster than the build's own, whose updates wait for sums over replicas; None
    if there is none.

    Args:
        seconds: of a minibatch with the build's own schedule.

    Returns:
        Its name, and its seconds for a minibatch.
    """
    if plan.dp == 1 or plan.schedule != Async.name:
        return None
    late_seconds = forecast(plan, costs, schedule=AsyncLate.name, policy=plan.policy).seconds_per_minibatch
    return (AsyncLate.name, late_seconds) if late_seconds < LEAST * seconds else None


def expect(plan: Plan, costs: BuildCosts, recipe: Recipe) -> tuple[Scenario, Simulation]:
    """The scenario that `forecast` simulates, and the simulation, for a build and a recipe.

    Raises:
        BuildError: like `forecast`.
    """
    scenario = scenario_of(plan, costs, recipe.demand)
    return scenario, simulate(recipe.schedule, scenario, steady_minibatches(recipe.schedule))
