"""How workers look in a terminal: a number in a colour of its own, the same as on the report's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpipe.inspection.report.marks import colour

if TYPE_CHECKING:
    from rich.text import Text


def mark(rank: int, before: str = "", after: str = "") -> Text:
    """`F0`: a worker's number in its colour, with the text around it."""
    from rich.text import Text

    return Text(f"{before}{rank}{after}", style=f"bold {colour(rank)}")


def ranks(workers: Sequence[int], backward: bool = False) -> Text:
    """Where something runs: `0`, `0→1` in forward, `0←1` in backward; `0,2` with a gap; `–` nowhere."""
    from rich.text import Text

    if not workers:
        return Text("–", style="dim")
    if len(workers) == 1:
        return mark(workers[0])
    if workers[-1] - workers[0] == len(workers) - 1:
        return Text.assemble(mark(workers[0]), "←" if backward else "→", mark(workers[-1]))
    return Text(",").join(mark(rank) for rank in workers)
