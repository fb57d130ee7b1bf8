"""What drawings are made of: elements, whose text is always text, and round numbers for axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, TypeVar

from markupsafe import Markup

T = TypeVar("T")
WIDTH = 1094
"""Units that a drawing of SVG is wide: pixels, where the window is as wide as the page."""


def tag(name: str, *inside: Any, **attributes: Any) -> Markup:
    """An element: `tag("text", "F0", x=1.0, text_anchor="middle", class_="lane")`; what is None is left out."""
    given = [
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), f"{value:.6g}" if isinstance(value, float) else value
        )
        for key, value in attributes.items()
        if value is not None
    ]
    content = (part for part in inside if part is not None)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup("").join(given), Markup("").join(content))


def told(*lines: str | None) -> str:
    """What is told of an element where the mouse or the focus is: its `data-tip`, a line a line."""
    return "\n".join(line for line in lines if line)


def runs(values: Iterable[T]) -> Iterator[tuple[int, int, T]]:
    """Maximal runs of equal values, as (first, end, value)."""
    place = 0
    for value, same in groupby(values):
        first, place = place, place + len(list(same))
        yield first, place, value


def ticks(low: float, high: float, most: float = 6) -> list[float]:
    """Round numbers within a range, at most about so many: multiples of 1, 2 or 5 times a power of ten."""
    least = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= least * 0.999)
    return [k * step for k in range(math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6) + 1)]


def room(label: str) -> float:
    """The room that a label takes in the small fixed-width type of drawings."""
    return 7.1 * len(label) + 8


def fitting(labels: Iterable[str], space: float) -> str | None:
    """The first label that has room; None if none does."""
    return next((label for label in labels if room(label) <= space), None)
