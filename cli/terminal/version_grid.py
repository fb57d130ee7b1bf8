"""The grid of actions in a terminal: what every worker does, and which version of its weights each action sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fxpipe.cli.output import print_text
from fxpipe.cli.terminal.worker_marks import colour, mark

from fxpipe.schedule.picture import IDLE

if TYPE_CHECKING:
    from rich.console import Console

MANY = 8
"""With more workers than this, only as much time is shown as fits into the width."""

_CELL = re.compile(
    r"((?P<worker>\d+):)?(?P<phase>[FB])(?P<minibatch>\d+)(\.(?P<part>\d+))?@(?P<version>\d+)(\+(?P<ahead>\d+))?"
)


def print_grid(grid: dict[str, Any], console: Console) -> None:
    """A sentence that explains a cell, then a row for each rank and a column for each action, broken at the width."""
    rows: list[list[str]] = grid["rows"]
    console.print(f"{grid['schedule']} · {grid['policy']}")
    if not rows:
        console.print("what its actions see is not known here")
        return
    print_text(console, explained(rows))
    console.print()
    columns = max(map(len, rows))
    cell = max(len(text) for row in rows for text in row) + 1
    number = len(str(len(rows) - 1))
    fits = max(1, (console.width - number - 2) // cell)
    if len(rows) > MANY and columns > fits:
        first = _busiest(rows, columns, fits)
        _print_part(rows, first, first + fits, cell, number, console)
        console.print(f"columns {first + 1} to {first + fits} of {columns}, where most is under way; --json has all")
        return
    for first in range(0, columns, fits):
        if first:
            console.print()
        _print_part(rows, first, first + fits, cell, number, console)


def explained(rows: Sequence[Sequence[str]]) -> str:
    """What one of the cells says, in words: one that predicts, or else one that is stale, if there is any."""
    found = [match for row in rows for text in row if (match := _CELL.fullmatch(text))]

    def telling(cell: re.Match[str]) -> tuple[bool, ...]:
        behind = int(cell["minibatch"]) - int(cell["version"])
        return cell["ahead"] is not None, behind > 0, int(cell["version"]) > 0, cell["part"] is not None

    cell = max(found, key=telling)
    what = "forward" if cell["phase"] == "F" else "backward"
    part = f", microbatch {cell['part']}," if cell["part"] else ""
    updates = f"{cell['version']} update{'' if cell['version'] == '1' else 's'}"
    ahead = f", predicted {cell['ahead']} further" if cell["ahead"] else ""
    return (
        f"{cell[0]}: the {what} of minibatch {cell['minibatch']}{part} sees its worker's weights "
        f"after {updates}{ahead}. "
        f"In ordinary training minibatch m sees version m. {IDLE} is a worker that waits."
        + (" A row is a process; each action has its worker before it." if cell["worker"] else "")
    )


def _busiest(rows: Sequence[Sequence[str]], columns: int, width: int) -> int:
    """Where a window of that width has the most actions; of several the one in the middle."""
    busy = [sum(column < len(row) and row[column] != IDLE for row in rows) for column in range(columns)]
    sums = [0, *accumulate(busy)]
    counts = [sums[first + width] - sums[first] for first in range(columns - width + 1)]
    best = [first for first, count in enumerate(counts) if count == max(counts)]
    return best[len(best) // 2]


def _print_part(rows: Sequence[Sequence[str]], first: int, end: int, cell: int, number: int, console: Console) -> None:
    from rich.text import Text

    for rank, row in enumerate(rows):
        line = Text.assemble(mark(rank, " " * (number - len(str(rank)))), "  ")
        for text in row[first:end]:
            of, action = text.split(":") if ":" in text else (str(rank), text)
            style = "dim" if text == IDLE else f"bold {colour(int(of))}" if action[0] == "B" else colour(int(of))
            line.append(text.ljust(cell), style)
        line.rstrip()
        console.print(line, no_wrap=True)
