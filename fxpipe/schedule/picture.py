"""Prints schedules: rows of cells as text."""

from __future__ import annotations

from collections.abc import Sequence

IDLE = ".."


def picture(rows: Sequence[Sequence[str]], of: str = "worker") -> str:
    """One line per worker, or rank, the cells in columns of one width.

    worker 0: F0 F1 .. B0
    worker 1: .. F0 B0
    """
    width = max((len(cell) for row in rows for cell in row), default=0)
    number = len(str(len(rows) - 1))
    return "\n".join(
        f"{of} {place:>{number}}: {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for place, row in enumerate(rows)
    )


def marked(action: object) -> str:
    """The cell of an action that breaks a law: `>F3<`."""
    return f">{action}<"
