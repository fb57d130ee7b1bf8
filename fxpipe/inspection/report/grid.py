"""The schedule as a grid: which action each worker does when, and which version of its weights it sees."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.inspection.grid import CELL


def cells(rows: Sequence[Sequence[str]]) -> list[list[tuple[str, str, str]]]:
    """For each rank its steps: action, what it sees, class; all empty if the rank waits.

    Where ranks have several workers, an action has its worker before it: `2:F0`.
    """
    wide = max(map(len, rows))
    return [[_cell(rank, row[i] if i < len(row) else "") for i in range(wide)] for rank, row in enumerate(rows)]


def _cell(rank: int, label: str) -> tuple[str, str, str]:
    if not (found := CELL.fullmatch(label)):
        return "", "", ""
    action, at, seen = label.partition("@")
    return action, at + seen, f"k-{'F' if found['phase'] == 'F' else 'B'} w{int(found['worker'] or rank) % 8}"
