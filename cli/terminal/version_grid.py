"""The grid of actions in a terminal: what every worker does, and which version of its weights each action sees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fxpipe.cli.output import mark, print_text
from rich.console import Console
from rich.text import Text

from fxpipe.inspection.grid import explained
from fxpipe.inspection.report.marks import colour
from fxpipe.schedule.order import IDLE

MANY = 8
"""With more workers than this, only the columns that fit into the width are shown."""


def print_grid(grid: dict[str, Any], console: Console) -> None:
    """A sentence that explains a cell, then a row for each rank and a column for each action, broken at the width."""
    rows: list[list[str]] = grid["rows"]
    console.print(f"{grid['schedule']} · {grid['policy']}")
    if not rows:
        console.print("which weights its actions see is not known here")
        return
    print_text(console, f"{explained(rows)} {IDLE} is a worker that waits.")
    console.print()
    columns = max(map(len, rows))
    cell = max(len(text) for row in rows for text in row) + 1
    number = len(str(len(rows) - 1))
    fits = max(1, (console.width - number - 2) // cell)
    if len(rows) > MANY and columns > fits:
        first = _busiest(rows, columns, fits)
        _print_part(rows, first, first + fits, cell, number, console)
        console.print(
            f"columns {first + 1} to {first + fits} of {columns}, those with the most actions; --json has all"
        )
        return
    for first in range(0, columns, fits):
        if first:
            console.print()
        _print_part(rows, first, first + fits, cell, number, console)


def _busiest(rows: Sequence[Sequence[str]], columns: int, width: int) -> int:
    """The window of that width with the most actions; of several, the one in the middle."""
    busy = [sum(column < len(row) and row[column] != IDLE for row in rows) for column in range(columns)]
    sums = [0, *accumulate(busy)]
    counts = [sums[first + width] - sums[first] for first in range(columns - width + 1)]
    best = [first for first, count in enumerate(counts) if count == max(counts)]
    return best[len(best) // 2]


def _print_part(rows: Sequence[Sequence[str]], first: int, end: int, cell: int, number: int, console: Console) -> None:
    for rank, row in enumerate(rows):
        line = Text.assemble(mark(rank, " " * (number - len(str(rank)))), "  ")
        for text in row[first:end]:
            of, action = text.split(":") if ":" in text else (str(rank), text)
            style = "dim" if text == IDLE else f"bold {colour(int(of))}" if action[0] == "B" else colour(int(of))
            line.append(text.ljust(cell), style)
        line.rstrip()
        console.print(line, no_wrap=True)
