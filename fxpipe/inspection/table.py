"""A table: its columns, each with its title, what it shows of a row, and how that is written.

The terminal (`fxpipe.cli.output`) and the page (`fxpipe.inspection.report.tables`) draw it; rows are those of --json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.inspection import formats

Cell = str | tuple[str | int, ...]
"""What a cell shows: a text, or pieces of text with the workers between them, as numbers."""


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        write: the value as it is read.
        left: its cells are words, and stand on the left.
        elastic: they are names, which are shortened, or broken anywhere, where there is too little room.
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
"""Milliseconds, those of a table all in one unit, which their titles name."""
SPAN = Kind(formats.number)
"""Milliseconds, those of a column in one unit."""
WRITTEN = Kind(formats.text)
"""A number that is written already."""
TEXT = Kind(formats.text, left=True)
NAME = Kind(formats.text, left=True, elastic=True)
NAMES = Kind(formats.listed, left=True, elastic=True)
YES = Kind(formats.yes, left=True)
WORKERS = Kind(lambda cell: formats.NONE if cell is None else cell if isinstance(cell, tuple) else (cell,), left=True)
"""A worker by its number, or pieces with workers between them."""


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        of: the key of its value in a row, which need not be there, or a function of the row.
        spare: if there is too little room, columns are left out, those with the largest number first; 0 never is.
    """

    title: str
    of: str | Callable[[Any], Any]
    kind: Kind = NUMBER
    spare: int = 0

    def value(self, row: Any) -> Any:
        """The value in a row; None if it is not known."""
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
