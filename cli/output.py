"""The output of commands: data to stdout, progress and warnings to stderr, one JSON object with --json."""

from __future__ import annotations

import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from fxpipe.planner.quantity import size
from fxpipe.typed_json import dumps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = [
    "TextColumn",
    "TimeUnit",
    "emit_json",
    "note",
    "plain",
    "plain_lines",
    "print_columns",
    "print_table",
    "print_text",
    "short_size",
    "shortened",
    "size",
    "stdout_console",
    "warn",
    "working",
]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

QUIET = 1.0
"""Seconds between two lines of progress in a pipe."""


def emit_json(data: Any) -> None:
    """One JSON object on stdout."""
    click.echo(dumps(data))


def warn(message: str) -> None:
    click.echo(click.style("warning: ", fg="yellow") + plain_lines(message), err=True)


def note(message: str) -> None:
    """A line of progress."""
    click.echo(plain_lines(message), err=True)


def plain(text: str) -> str:
    """A text of one line without control characters: names come from the user, and a terminal would obey them."""
    return text if text.isprintable() else _CONTROL.sub("", text)


def plain_lines(text: str) -> str:
    """Like `plain`, line by line."""
    return "\n".join(map(plain, text.split("\n")))


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what takes a while: a spinner on a terminal; in a pipe a line from time to time, after one second.

    Yields a function to call with what is being done.
    """
    from rich.console import Console
    from rich.text import Text

    if sys.stderr.isatty():
        console = Console(stderr=True, highlight=False, emoji=False, markup=False)
        with console.status(Text(what)) as status:
            yield lambda text: status.update(Text(plain(text)))
        return
    last = time.monotonic()
    waiting: threading.Timer | None = None

    def say(text: str) -> None:
        nonlocal last, waiting
        if waiting is not None:
            waiting.cancel()
        rest = max(QUIET - (time.monotonic() - last), 0.0)
        waiting = threading.Timer(rest, tell, [text])  # no need to report what takes less than a second
        waiting.daemon = True
        waiting.start()

    def tell(text: str) -> None:
        nonlocal last
        last = time.monotonic()
        note(f"{what}: {text}")

    try:
        yield say
    finally:
        if waiting is not None:
            waiting.cancel()


def print_table(headers: list[str], rows: list[list[str]], left: int = 1) -> None:
    """A table on stdout; the first `left` columns are text, the others numbers. Wide enough for its content."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(Text(plain(header)), justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    width = Console().width if sys.stdout.isatty() else 0
    console = Console(width=max(width, 160), highlight=False, emoji=False, markup=False)
    console.print(table, soft_wrap=True)  # a narrow terminal wraps lines, never words


@dataclass
class TextColumn:
    """A column of a table that fits its terminal.

    Attributes:
        header: the text above it.
        right: whether cells are aligned to the right.
        spare: if there is too little room, columns are left out, those with the largest number first; 0 never is.
        elastic: if there is still too little room, its cells are shortened in the middle.
    """

    header: str
    right: bool = False
    spare: int = 0
    elastic: bool = False
    cells: list[Text | str] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Characters of the widest cell."""
        from rich.cells import cell_len

        texts = (plain(cell) if isinstance(cell, str) else cell.plain for cell in self.cells)
        return max([cell_len(self.header), *map(cell_len, texts)])


_GAP = 2
_ELASTIC = 32
"""How wide an elastic column may be before other columns are left out for it."""
_LEAST = 10
"""The least width that it keeps."""


def print_columns(columns: Sequence[TextColumn], console: Console) -> None:
    """A table no wider than the console: columns are left out, then shortened. Text as it is: no trailing blanks."""
    from rich.text import Text

    widths = _fitting(columns, console.width)
    shown = [(column, widths[i]) for i, column in enumerate(columns) if i in widths]
    line = Text((" " * _GAP).join(_aligned(Text(c.header), c, w).plain for c, w in shown).rstrip(), style="bold")
    console.print(line, no_wrap=True, crop=False, overflow="ignore")
    console.print("─" * (sum(w for _, w in shown) + _GAP * (len(shown) - 1)), no_wrap=True, crop=False)
    for row in zip(*(column.cells for column, _ in shown), strict=True):
        cells = [_aligned(shortened(cell, w), c, w) for cell, (c, w) in zip(row, shown, strict=True)]
        line = Text(" " * _GAP).join(cells)
        line.rstrip()
        console.print(line, no_wrap=True, crop=False, overflow="ignore")


def _fitting(columns: Sequence[TextColumn], room: int) -> dict[int, int]:
    """The width of each column that is shown."""
    full = {i: column.width for i, column in enumerate(columns)}
    wanted = {i: min(w, _ELASTIC) if columns[i].elastic else w for i, w in full.items()}

    def over() -> int:
        return sum(wanted.values()) + _GAP * (len(wanted) - 1) - room

    while over() > 0 and (spare := max(columns[i].spare for i in wanted)):
        wanted = {i: w for i, w in wanted.items() if columns[i].spare != spare}
    elastic = [i for i in wanted if columns[i].elastic]
    while over() > 0 and elastic and max(wanted[i] for i in elastic) > _LEAST:
        wanted[max(elastic, key=wanted.__getitem__)] -= 1
    for i in elastic:
        wanted[i] = min(full[i], wanted[i] + max(0, -over()))
    return wanted


def _aligned(text: Text, column: TextColumn, width: int) -> Text:
    text = text.copy()
    blank = " " * (width - text.cell_len)
    return text if not blank else type(text).assemble(blank, text) if column.right else text.append(blank)


def shortened(cell: Text | str, width: int) -> Text:
    """A cell of at most this many characters: the middle of a longer one becomes `…`."""
    from rich.text import Text

    text = Text(plain(cell)) if isinstance(cell, str) else cell
    over = text.cell_len - width
    if over <= 0:
        return text
    head = (width - 1) // 3
    return Text.assemble(text[:head] if head else "", "…", text[head + over + 1 :])


def stdout_console() -> Console:
    """Stdout for rich: as wide as the terminal, or COLUMNS if that is set, else 80; no colours in a pipe."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, emoji=False, markup=False)


def print_text(console: Console, text: str, style: str = "") -> None:
    """Prose, broken between words where the width ends."""
    from rich.text import Text

    for line in textwrap.wrap(plain_lines(text), console.width, break_long_words=False, break_on_hyphens=False):
        console.print(Text(line), style=style, no_wrap=True, crop=False, overflow="ignore")


class TimeUnit:
    """Writes the times of one table in one unit; in `µs` if all are shorter than a millisecond."""

    def __init__(self, milliseconds: Iterable[float | None]) -> None:
        most = max((ms for ms in milliseconds if ms is not None), default=0.0)
        self.unit, self._factor = ("µs", 1e3) if most < 1 else ("s", 1e-3) if most >= 1e5 else ("ms", 1.0)
        scaled = most * self._factor
        self._digits = 0 if scaled >= 1000 else 1 if scaled >= 100 else 2

    def __call__(self, ms: float | None) -> str:
        """The number alone, with as many digits as the longest one allows; `–` for None."""
        return "–" if ms is None else f"{ms * self._factor:.{self._digits}f}"


def short_size(count: float) -> str:
    """`1.5M`: a size in few characters; K, M, G are powers of 1024."""
    return size(count).replace(" ", "").replace("iB", "")
