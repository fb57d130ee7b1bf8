"""A build's forecast and first minibatches on a time axis, simulated; and the weights that each of its actions sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.observe.rates import samples_of
from fxpipe.policy.base import sight_rows
from fxpipe.policy.recipe import Recipe
from fxpipe.schedule.action import Action
from fxpipe.simulator.memory import ActionMemory, memory_of
from fxpipe.simulator.of_build import expect
from fxpipe.simulator.simulate import Simulation, simulate

MINIBATCHES = 12
"""This many are shown, or more with many workers, if `SPANS` allows."""

SPANS = 6000
"""About this many spans are shown at most."""


def outlook(subject: Subject, recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Forecast and timeline under a schedule and a policy."""
    names = recipe.schedule.name, str(recipe.policy)
    scenario, steady = expect(subject.plan, subject.costs, recipe)
    period = steady.seconds_per_minibatch
    rate = steady.samples_per_second(samples_of(subject.plan))
    microbatches, rows = subject.plan.own_microbatches, range(subject.plan.workers)
    forecast = {
        "schedule": names[0],
        "policy": names[1],
        "samples_per_second": rate if period else None,  # JSON has no infinity
        "milliseconds": 1e3 * period,
        "bubble": steady.bubble,
        "busy": [scenario.busy(k, microbatches) / period if period else 0.0 for k in rows],
    }
    shown = _minibatches(subject)
    memory = [
        memory_of(subject.plan, subject.costs, recipe.demand, worker, list(recipe.schedule.until(worker, shown)))
        for worker in rows
    ]
    return forecast, _timeline(simulate(recipe.schedule, scenario, shown), memory)


def _minibatches(subject: Subject) -> int:
    """Enough to show the full pipeline, but not too many for a page."""
    workers, spans = subject.plan.workers, 4 * subject.plan.own_microbatches  # spans of a minibatch, about
    return max(2, min(max(MINIBATCHES, workers + 4), SPANS // (workers * spans)))


def _timeline(simulation: Simulation, memory: Sequence[Sequence[ActionMemory]]) -> dict[str, Any]:
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
        "memory": [_memory(simulation, levels, worker) for worker, levels in enumerate(memory)],
    }


def _memory(simulation: Simulation, levels: Sequence[ActionMemory], worker: int) -> dict[str, Any]:
    """The bytes held over time: an action's peak from its start on, and what it leaves from its end on."""
    begins: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    for span in simulation.spans[worker]:
        begins.setdefault(span.action, span.start)
        ends[span.action] = span.end
    seconds, sizes = [0.0], [levels[0].before if levels else 0.0]
    for level in levels:
        for time, size in ((begins[level.action], level.during), (ends[level.action], level.after)):
            if time > seconds[-1]:
                seconds.append(time)
                sizes.append(size)
            else:
                sizes[-1] = max(sizes[-1], size)
    return {"worker": worker, "seconds": seconds, "bytes": sizes}


ACTIONS = 8
"""About this many forwards of each worker are shown, but at least two minibatches."""

FLUSHES = 3
"""The most minibatches that are shown of a schedule that flushes."""


def grid_rows(recipe: Recipe) -> list[list[str]]:
    """A row of cells for each worker, from an empty pipeline to an empty one: `F3@1+2`, or `..` if it waits."""
    schedule = recipe.schedule
    minibatches = max(2, ACTIONS // schedule.microbatches)
    if schedule.synchronous:  # after a flush, the schedule repeats
        minibatches = min(minibatches, FLUSHES)
    else:  # the pipeline fills first
        minibatches += schedule.workers // schedule.microbatches
    return sight_rows(recipe.policy, schedule, minibatches)


CELL = re.compile(
    r"(?:(?P<worker>\d+):)?(?P<phase>[FBW])(?P<minibatch>\d+)(?:\.(?P<part>\d+))?@(?P<version>\d+)(?:\+(?P<ahead>\d+))?"
)
"""A cell: an action, the version that it sees, and how many updates ahead of that are predicted."""

_PASSES = {"F": "forward", "B": "backward", "W": "weight gradients"}


def example(rows: Sequence[Sequence[str]]) -> str:
    """The cell that explains most: one with a prediction, else one with stale weights, if there are any."""
    cells = [cell for row in rows for text in row if (cell := CELL.fullmatch(text))]

    def telling(cell: re.Match[str]) -> tuple[bool, ...]:
        behind = int(cell["minibatch"]) - int(cell["version"])
        return cell["ahead"] is not None, behind > 0, int(cell["version"]) > 0, cell["part"] is not None

    return max(cells, key=telling)[0]


def in_words(text: str) -> str:
    """A cell in words: `F2@1+1: the forward of minibatch 2 sees its worker's weights after 1 update, …`."""
    cell = CELL.fullmatch(text)
    assert cell is not None
    part = f", microbatch {cell['part']}," if cell["part"] else ""
    updates = f"{cell['version']} update{'' if cell['version'] == '1' else 's'}"
    ahead = f", predicted {cell['ahead']} further" if cell["ahead"] else ""
    return (
        f"{text}: the {_PASSES[cell['phase']]} of minibatch {cell['minibatch']}{part} sees its worker's weights "
        f"after {updates}{ahead}."
    )


def explained(rows: Sequence[Sequence[str]]) -> str:
    """The `example` in words, and what a reader needs for the other cells."""
    shown = example(rows)
    several = " A row is a process; each action begins with its worker." if ":" in shown else ""
    return f"{in_words(shown)} In ordinary training minibatch m sees version m.{several}"
