"""How workers look in a terminal: a number in a colour of its own, the same as on the report's page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpipe.inspection.report.marks import colour

if TYPE_CHECKING:
    from rich.text import Text


def mark(rank: int, after: str = "") -> Text:
    """A worker's number in its colour, with the text after it."""
    from rich.text import Text

    return Text(f"{rank}{after}", style=f"bold {colour(rank)}")
