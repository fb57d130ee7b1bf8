"""Tables: each column has a title, a value for every row, and a format.

The terminal (`fxpipe.cli.output`) and the page (`fxpipe.inspection.report.tables`) draw them; rows are those of --json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.inspection import formats

Cell = str | tuple[str | int, ...]
"""A text, or pieces of text mixed with workers, which are integers."""


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        write: formats the value.
        left: whether cells are words, which are aligned to the left.
        elastic: whether cells are names, which are shortened, or broken anywhere, if there is little space.
    """

    write: Callable[[Any], Cell]
    left: bool = False
    elastic: bool = False


NUMBER = Kind(formats.number)
COUNT = Kind(formats.count)
SHARE = Kind(formats.share)
CLOCK = Kind(formats.clock)
MOMENT = Kind(formats.moment)
SIZE = Kind(formats.size)
"""Bytes."""
TIME = Kind(formats.number)
"""Milliseconds; the whole table shows them in one unit, which the titles name."""
SPAN = Kind(formats.number)
"""Milliseconds; each column has its own unit."""
WRITTEN = Kind(formats.text)
"""A number as text."""
TEXT = Kind(formats.text, left=True)
NAME = Kind(formats.text, left=True, elastic=True)
NAMES = Kind(formats.listed, left=True, elastic=True)
YES = Kind(formats.yes, left=True)
WORKERS = Kind(lambda cell: formats.NONE if cell is None else cell if isinstance(cell, tuple) else (cell,), left=True)
"""A worker's number, or pieces with workers among them."""


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        of: the key of its value in a row, which may lack it, or a function of the row.
        spare: if there is little space, columns with the largest number are left out first; those with 0 never.
    """

    title: str
    of: str | Callable[[Any], Any]
    kind: Kind = NUMBER
    spare: int = 0

    def value(self, row: Any) -> Any:
        """The value in a row; None if unknown."""
        return row.get(self.of) if isinstance(self.of, str) else self.of(row)


@dataclass(frozen=True)
class ShownTable:
    """Columns and the rows that they read."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""

    def written(self) -> tuple[list[str], list[list[Cell]]]:
        """The titles, and the cells of every row."""
        timed = [column for column in self.columns if column.kind is TIME]
        shared = formats.TimeUnit(column.value(row) for column in timed for row in self.rows)
        units = [
            shared if c.kind is TIME else formats.TimeUnit(map(c.value, self.rows)) if c.kind is SPAN else None
            for c in self.columns
        ]
        titles = [f"{c.title} {unit.unit}" if unit else c.title for c, unit in zip(self.columns, units, strict=True)]
        cells = [(c, unit or c.kind.write) for c, unit in zip(self.columns, units, strict=True)]
        return titles, [[write(column.value(row)) for column, write in cells] for row in self.rows]
