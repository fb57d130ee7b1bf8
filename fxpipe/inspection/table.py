"""Tables: each column has a title, a value for every row, and a format, which writes a number as text.

The terminal (`fxpipe.cli.output`) and the page (`fxpipe.inspection.report.drawing`) draw them. Rows are those of
--json. What is unknown is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpipe.planner import quantity
from fxpipe.planner.links import Links

Cell = str | tuple[str | int, ...]
"""A text, or pieces of text mixed with workers, which are integers."""

Json = dict[str, Any]

NONE = "–"


def or_dash(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """The same form, with a dash for None and NaN."""

    def formatted(value: Any) -> str:
        return NONE if value is None or value != value else form(value)  # NaN differs from itself

    return formatted


def digits(value: float) -> str:
    """Three significant digits, and all digits before the point: 0.0123, 1.23, 12.3, 1,234."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e15 or size < 1e-5:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 99.95 else f"{value:#.3g}"


def plural(n: int, one: str, many: str | None = None) -> str:
    """A number and what it counts: 1 edge, 1,234 edges."""
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


@or_dash
def listed(values: Iterable[Any]) -> str:
    """The values in their order, each once, with commas."""
    return ", ".join(dict.fromkeys(map(str, values))) or NONE


text = or_dash(lambda value: value if isinstance(value, str) else str(value))
number = or_dash(digits)
count = or_dash(lambda value: f"{value:,}")
size = or_dash(quantity.size)
ms = or_dash(lambda value: f"{digits(value)} ms")
share = or_dash(lambda value: f"{100 * value:.1f}%")
clock = or_dash(lambda value: f"{value:.3f}")
moment = or_dash(lambda value: f"{value:.6f}")
yes = or_dash(lambda value: "yes" if value else "no")


class TimeUnit:
    """Writes times in one unit, which the longest of them decides: µs, ms or s."""

    def __init__(self, milliseconds: Iterable[float | None]) -> None:
        most = max((ms for ms in milliseconds if ms is not None), default=0.0)
        self.unit, self._factor = ("µs", 1e3) if most < 1 else ("s", 1e-3) if most >= 1e5 else ("ms", 1.0)
        scaled = most * self._factor
        self._digits = 0 if scaled >= 1000 else 1 if scaled >= 100 else 2

    def __call__(self, ms: float | None) -> str:
        """The number without its unit; the longest time decides how many decimals all have. None is a dash."""
        return NONE if ms is None else f"{ms * self._factor:.{self._digits}f}"


def described_links(links: Links) -> str:
    """Links in a few words."""
    if links.free:
        return "no communication"
    if isinstance(links.bandwidth, tuple) or isinstance(links.latency, tuple):
        return "links by matrix"
    return f"links {links.bandwidth / 1e9:.4g} GB/s, {links.latency * 1e6:.4g} µs"


@dataclass(frozen=True)
class Kind:
    """A kind of value."""

    write: Callable[[Any], Cell]  # formats the value
    left: bool = False  # whether cells are words, which are aligned to the left
    elastic: bool = False  # whether cells are names, which are shortened, or broken anywhere, if there is little space


NUMBER = Kind(number)
COUNT = Kind(count)
SHARE = Kind(share)
CLOCK = Kind(clock)
MOMENT = Kind(moment)
SIZE = Kind(size)
"""Bytes."""
TIME = Kind(number)
"""Milliseconds; the whole table shows them in one unit, which the titles name."""
SPAN = Kind(number)
"""Milliseconds; each column has its own unit."""
WRITTEN = Kind(text)
"""A number as text."""
TEXT = Kind(text, left=True)
NAME = Kind(text, left=True, elastic=True)
NAMES = Kind(listed, left=True, elastic=True)
YES = Kind(yes, left=True)
WORKERS = Kind(lambda cell: NONE if cell is None else cell if isinstance(cell, tuple) else (cell,), left=True)
"""A worker's number, or pieces with workers among them."""


@dataclass(frozen=True)
class Column:
    """A column."""

    title: str
    of: str | Callable[[Any], Any]  # the key of its value in a row, which may lack it, or a function of the row
    kind: Kind = NUMBER
    spare: int = 0  # if there is little space, columns with the largest number are left out first; those with 0 never

    def value(self, row: Any) -> Any:
        """The value in a row; None if unknown."""
        return row.get(self.of) if isinstance(self.of, str) else self.of(row)


def within(part: str, name: str, row: Json) -> Any:
    """A value of a part of a row; None if the row lacks it."""
    return (row.get(part) or {}).get(name)


@dataclass(frozen=True)
class ShownTable:
    """Columns and the rows that they read."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""

    def filled(self) -> ShownTable:
        """Without the columns that have a value in no row."""
        columns = [column for column in self.columns if any(column.value(row) is not None for row in self.rows)]
        return replace(self, columns=columns)

    def written(self) -> tuple[list[str], list[list[Cell]]]:
        """The titles, and the cells of every row."""
        timed = [column for column in self.columns if column.kind is TIME]
        shared = TimeUnit(column.value(row) for column in timed for row in self.rows)
        units = [
            shared if c.kind is TIME else TimeUnit(map(c.value, self.rows)) if c.kind is SPAN else None
            for c in self.columns
        ]
        titles = [f"{c.title} {unit.unit}" if unit else c.title for c, unit in zip(self.columns, units, strict=True)]
        cells = [(c, unit or c.kind.write) for c, unit in zip(self.columns, units, strict=True)]
        return titles, [[write(column.value(row)) for column, write in cells] for row in self.rows]
