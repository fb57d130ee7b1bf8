"""The order of actions, and the version of the weights that each sees."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fxpipe.policy.picture import sight_rows
from fxpipe.policy.recipe import Recipe

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
