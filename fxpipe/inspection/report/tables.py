"""Tables on the page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from markupsafe import Markup, escape

from fxpipe.inspection.formats import count
from fxpipe.inspection.report.marks import chip
from fxpipe.inspection.table import NAME, NAMES, Cell, Column, ShownTable

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
