"""Elements and tables of the page."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeVar
from zlib import compress

from markupsafe import Markup, escape

from fxpipe.inspection.report.marks import chip
from fxpipe.inspection.table import NAME, NAMES, Cell, Column, ShownTable, count

T = TypeVar("T")


def tag(name: str, *inside: Any, **attributes: Any) -> Markup:
    """An element: `tag("span", "F0", class_="lane", title="forward")`; None is left out."""
    pairs = [
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), f"{value:.6g}" if isinstance(value, float) else value
        )
        for key, value in attributes.items()
        if value is not None
    ]
    content = (part for part in inside if part is not None)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup("").join(pairs), Markup("").join(content))


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


ROWS = 10_000
"""If a table has more rows, only every n-th is shown."""


def drawn(table: ShownTable) -> Markup:
    """A table that scrolls within itself if it is wide."""
    step = max(1, -(-len(table.rows) // ROWS))
    titles, rows = replace(table, rows=table.rows[::step]).written()
    looks = [look(column) for column in table.columns]
    th = Markup('<th scope="col" class="{}">{}</th>')
    heads = Markup("").join(map(th.format, looks, titles))
    body = Markup("\n".join(f"<tr>{''.join(_cells(looks, row))}</tr>" for row in rows))
    words = f"Of {count(len(table.rows))} rows one in {step} is shown; inspect --json has all."
    more = Markup('<p class="quiet">{}</p>').format(words) if step > 1 else ""
    return Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="{0}"><table><caption class="unseen">{0}</caption>'
        "<thead><tr>{1}</tr></thead>\n<tbody>{2}</tbody></table>{3}</div>"
    ).format(table.title, heads, body, more)


def look(column: Column) -> str:
    """The class of a column's cells."""
    return "name" if column.kind in (NAME, NAMES) else "nobreak" if column.kind.left else "n"


def content(cell: Cell) -> str:
    """What a cell shows, as HTML."""
    pieces = (cell,) if isinstance(cell, str) else cell
    return "".join(chip(piece) if isinstance(piece, int) else escape(piece) for piece in pieces)


def _cells(looks: Iterable[str], row: Iterable[Cell]) -> Iterable[str]:
    return (f'<td class="{look}">{content(cell)}</td>' for look, cell in zip(looks, row, strict=True))
