"""How workers look in a terminal: a number in a colour of its own, the same as on the report's page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

COLOURS = ("#4477AA", "#EE7733", "#228833", "#CC3311", "#AA3377", "#33BBEE", "#CCBB44", "#777777")


def colour(rank: int) -> str:
    """The hue of a worker; every eighth has the same."""
    return COLOURS[rank % len(COLOURS)]


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


def listed(workers: Iterable[int]) -> str:
    """`worker 1`, `workers 0, 2 and 3`."""
    *first, last = (str(worker) for worker in workers)
    return f"workers {', '.join(first)} and {last}" if first else f"worker {last}"
