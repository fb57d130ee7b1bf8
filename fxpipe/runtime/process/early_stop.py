"""A run that ends before the step it was to end after: where all its workers can still stop together.

What ends it is known between two actions, when all workers have made the same number of updates (the version). By then
some have begun later minibatches, have posted receives for those after them, and count on weights that are read later
still. So the end is some steps on, where none of that reaches:

    evaluated at version 20 ─→ the run ends after step 20 + `lead`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.process.coming_shapes import AHEAD
from fxpipe.schedule.action import LOOKAHEAD, Event
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.check import held


def lead(recipe: Recipe, shapes: bool) -> int:
    """How many steps after a version a run can end, if its workers hear of it at that version.

    Args:
        shapes: batches have several shapes: worker 0 reads some ahead.
    """
    demand = recipe.demand
    reach = max(demand.reach(owner) for owner in range(demand.plan.workers))  # who reads weights that are expected
    return furthest(recipe.schedule) + reach + 1 + (AHEAD if shapes else 0)


def furthest(schedule: Schedule) -> int:
    """How far a worker at version v has looked ahead, at most: to an action of minibatch v plus this."""
    begun = -(-max(held(schedule)) // schedule.microbatches) + schedule.late
    expected = -(-(LOOKAHEAD + 1) // schedule.microbatches)
    return begun + expected + 1


def ending(row: Iterator[Event], end: Callable[[], int], recipe: Recipe) -> Iterator[Event]:
    """What a row has of minibatches before `end()`, which may become smaller meanwhile.

    As `Schedule.until` has it, all of them come before so many later ones.
    """
    patience = 4 * recipe.schedule.workers * recipe.schedule.microbatches
    for event in row:
        if event[1].minibatch < end():
            yield event
        else:
            patience -= 1
            if patience < 0:
                return
