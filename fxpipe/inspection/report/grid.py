"""The schedule as a grid: which action each worker does when, and which version of its weights it sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fxpipe.inspection.report.formats import plural

_CELL = re.compile(r"(?:\d+:)?([FBW])(\d+)(?:\.(\d+))?(?:@(\d+))?(?:\+(\d+))?")


def cells(rows: Sequence[Sequence[str]], first: int, end: int) -> list[list[tuple[str, str, str]]]:
    """For each rank the steps of a range: action, what it sees, class; all empty if the rank waits.

    Where ranks have several workers, an action has its worker before it: `2:F0`.
    """
    return [[_cell(rank, row[i] if i < len(row) else "") for i in range(first, end)] for rank, row in enumerate(rows)]


def _cell(rank: int, label: str) -> tuple[str, str, str]:
    if not (found := _CELL.fullmatch(label)):
        return "", "", ""
    action, at, seen = label.partition("@")
    worker = int(label.split(":")[0]) if ":" in label else rank
    return action, at + seen, f"k-{'F' if found[1] == 'F' else 'B'} w{worker % 8}"


def example(grid: dict[str, Any]) -> str:
    """One sentence about a cell of this very grid, the most telling one."""
    found = [cell for row in grid["rows"] for label in row if (cell := _CELL.fullmatch(label)) and cell[4]]
    under = f"Under schedule {grid['schedule']} and policy {grid['policy']}, "
    row = "process, whose actions have their worker before them," if ":" in str(grid["rows"]) else "worker"
    if not found:
        return f"{under}each row is a {row} and each column one step of the pipeline."
    cell = max(found, key=lambda c: (bool(c[5]), bool(c[5]) and c[1] == "F" and int(c[4]) > 0, int(c[4]) > 0))
    passes = {"F": "forward", "B": "backward", "W": "weight gradients"}[cell[1]]
    microbatch = f", microbatch {cell[3]}," if cell[3] else ""
    ahead = f", predicted {cell[5]} further" if cell[5] else ""
    return (
        f"{under}{cell[0]} is the {passes} of minibatch {cell[2]}{microbatch} with the worker's weights after "
        f"{plural(int(cell[4]), 'update')}{ahead}; a dot is a step in which a worker waits."
    )
