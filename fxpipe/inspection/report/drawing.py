"""Parts of drawings: elements with escaped text, places in percent, and round numbers for axes."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, TypeVar
from zlib import compress

from markupsafe import Markup

T = TypeVar("T")


def tag(name: str, *inside: Any, **attributes: Any) -> Markup:
    """An element: `tag("span", "F0", class_="lane", title="forward")`; None is left out."""
    given = [
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), f"{value:.6g}" if isinstance(value, float) else value
        )
        for key, value in attributes.items()
        if value is not None
    ]
    content = (part for part in inside if part is not None)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup("").join(given), Markup("").join(content))


def folded(inside: Markup) -> Markup:
    """Compressed text that the page turns into elements when it is opened; tables are most of a page."""
    return tag("script", b64encode(compress(inside.encode(), 9)).decode(), type="text/zlib")


def stretch(first: float, end: float, whole: float, *inside: Any, **looks: Any) -> Markup:
    """A box from `first` to `end` on a row of length `whole`; its tooltip is `title`."""
    return tag("i", *inside, **looks, style=f"left:{100 * first / whole:.4f}%;width:{100 * (end - first) / whole:.4f}%")


def runs(values: Iterable[T]) -> Iterator[tuple[int, int, T]]:
    """Maximal runs of equal values, as (first, end, value)."""
    place = 0
    for value, same in groupby(values):
        first, place = place, place + len(list(same))
        yield first, place, value


def ticks(low: float, high: float, most: float = 6) -> list[float]:
    """About `most` round numbers within a range, or fewer: multiples of 1, 2 or 5 times a power of ten."""
    least = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= least * 0.999)
    return [k * step for k in range(math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6) + 1)]
