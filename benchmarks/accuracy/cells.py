"""How tables and the numbers in them are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(mean: float, std: float | None, metric: str) -> str:
    """A mean with its standard deviation, if there is one: accuracy in per cent, or nats."""
    scale, places = (1, 3) if metric == "nats" else (100, 1)
    spread = "" if std is None else f" ± {scale * std:.{places}f}"
    return f"{scale * mean:.{places}f}{spread}"
