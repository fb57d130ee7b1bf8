"""What the build will do: its forecast, and its first minibatches on a time axis, simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.observe.record import samples_of
from fxpipe.policy.recipe import Recipe
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.check import changes
from fxpipe.simulator.forecast import expect
from fxpipe.simulator.result import Simulation
from fxpipe.simulator.scenario import Scenario
from fxpipe.simulator.simulate import simulate

MINIBATCHES = 12
"""How many are shown, or more with many workers, if there is room for their spans."""

SPANS = 6000
"""About how many spans are shown at the most."""


@dataclass(frozen=True)
class Outlook:
    """The simulated build; its fields are None if the costs of the workers are not known."""

    forecast: dict[str, Any] | None = None
    timeline: dict[str, Any] | None = None


def outlook(subject: Subject, recipe: Recipe | None) -> Outlook:
    """Forecast and timeline under a schedule and a policy."""
    if recipe is None or not subject.known.workers:
        return Outlook()
    names = recipe.schedule.name, str(recipe.policy)
    scenario, steady = expect(subject.plan, subject.known, recipe)
    period = steady.seconds_per_minibatch
    rate = steady.samples_per_second(samples_of(subject.plan))
    forecast = {
        "schedule": names[0],
        "policy": names[1],
        "samples_per_second": rate if period else None,  # JSON has no infinity
        "milliseconds": 1e3 * period,
        "bubble": steady.bubble,
        "busy": [_share(scenario, k, subject.plan.microbatches, period) for k in range(subject.plan.workers)],
    }
    shown = simulate(recipe.schedule, scenario, _minibatches(subject))
    return Outlook(forecast, _timeline(shown, scenario, recipe.schedule))


def _share(scenario: Scenario, worker: int, microbatches: int, period: float) -> float:
    return scenario.busy(worker, microbatches) / period if period else 0.0


def _minibatches(subject: Subject) -> int:
    """Enough to show the full pipeline, and no more than a page can hold."""
    workers, each = subject.plan.workers, 4 * subject.plan.microbatches  # spans of a worker's minibatch, about
    return max(2, min(max(MINIBATCHES, workers + 4), SPANS // (workers * each)))


def _timeline(simulation: Simulation, scenario: Scenario, schedule: Schedule) -> dict[str, Any]:
    spans = [
        [worker, span.kind, span.action.minibatch, span.action.microbatch, span.start, span.end]
        for worker, row in enumerate(simulation.spans)
        for span in row
        if span.end > span.start
    ]
    return {
        "seconds": simulation.seconds,
        "minibatches": len(simulation.finished),
        "spans": spans,
        "memory": [_memory(simulation, scenario, schedule, worker) for worker in range(simulation.workers)],
    }


def _memory(simulation: Simulation, scenario: Scenario, schedule: Schedule, worker: int) -> dict[str, Any]:
    """The bytes held from each of several moments on.

    A microbatch has saved values from its F's start to its B's end, deferred ones from there to the end of its W.
    """
    cost = scenario.workers[worker]
    change = changes(schedule, cost.saved_bytes, cost.deferred_bytes)
    moments: dict[Action, float] = {}
    for span in simulation.spans[worker]:
        if span.action.phase == "F":
            moments.setdefault(span.action, span.start)
        else:
            moments[span.action] = span.end
    steps = sorted((time, change[action.phase]) for action, time in moments.items())
    held, seconds, sizes = 0.0, [0.0], [cost.static_bytes]
    for time, more in steps:
        held += more
        if time > seconds[-1]:
            seconds.append(time)
            sizes.append(0.0)
        sizes[-1] = cost.static_bytes + held
    return {"worker": worker, "seconds": seconds, "bytes": sizes}
