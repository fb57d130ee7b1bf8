"""The order of actions, and the version of the weights that each sees."""

from __future__ import annotations

from fxpipe.policy.picture import sight_rows
from fxpipe.policy.recipe import Recipe

ACTIONS = 8
"""At least this many forwards of a worker are shown: of as many minibatches, or fewer with several microbatches."""


FLUSHES = 3
"""The most minibatches that are shown of a schedule that flushes."""


def grid_rows(recipe: Recipe) -> list[list[str]]:
    """A row of cells for each worker, from an empty pipeline to an empty one: `F3@1+2`, or `..` when it waits."""
    schedule = recipe.schedule
    minibatches = max(2, ACTIONS // schedule.microbatches)
    if schedule.synchronous:  # after a flush it only repeats itself
        minibatches = min(minibatches, FLUSHES)
    else:  # the pipeline fills first
        minibatches += schedule.workers // schedule.microbatches
    return sight_rows(recipe.policy, schedule, minibatches)
