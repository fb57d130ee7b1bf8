"""The output of commands: data to stdout, progress and warnings to stderr, one JSON object with --json."""

from __future__ import annotations

import errno
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TextIO

import click

from fxpipe.errors import FxpipeError
from fxpipe.inspection.table import Cell, Column, Json, ShownTable
from fxpipe.messages import from_here, how_far, plain, plain_lines
from fxpipe.typed_json import dumps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

QUIET = 0.9
"""Seconds until the first line of progress in a pipe: shorter work is not reported."""
AGAIN, LONG = 5.0, 60.0
"""Seconds between two further lines, and after how many seconds they become fewer."""
SPIN = 0.25
"""Seconds between two updates of the display on a terminal."""


_json: TextIO | None = None  # the real stdout, inside `only_json_on_stdout`


class OutputLost(FxpipeError):
    """Stdout cannot be written, for example because a disk is full. A closed pipe is no error: its reader has left."""


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Text on stdout or stderr: the one way out, and the filter (see `plain`)."""
    try:
        click.echo(plain_lines(from_here(text)), err=err, nl=nl)
    except OSError as error:
        raise _lost(error) from error


def echo_file(text: str) -> None:
    """A file as it is, byte for byte; a terminal gets no control characters: the file may come from anywhere."""
    if sys.stdout.isatty():
        echo(text.expandtabs(), nl=False)
    else:
        sys.stdout.write(text)


def emit_json(data: Any) -> None:
    """One JSON object on stdout."""
    try:
        click.echo(dumps(data), file=_json)
    except OSError as error:
        raise _lost(error) from error


def put(facts: Json, as_json: bool, show: Callable[[Json], object]) -> None:
    """Facts on stdout: as one JSON object, or as `show` prints them."""
    (emit_json if as_json else show)(facts)


@contextmanager
def only_json_on_stdout() -> Iterator[None]:
    """Inside, stdout is for `emit_json` alone: all that other code writes there goes to stderr.

    So does the stdout of processes that are started inside.
    """
    global _json
    shown = sys.stdout
    shown.flush()
    try:
        number = shown.fileno()
        duplicate = os.dup(number)
    except (OSError, ValueError):  # it is no file, or closed
        number = duplicate = -1
    stream = shown if duplicate < 0 else os.fdopen(duplicate, "w", encoding=shown.encoding, errors=shown.errors)
    if duplicate >= 0:
        with suppress(OSError):  # stderr is closed
            os.dup2(2, number)
    _json, sys.stdout = stream, sys.stderr
    try:
        yield
    finally:
        _json, sys.stdout = None, shown
        if duplicate >= 0:
            with suppress(OSError):
                shown.flush()  # of what a module kept from before
            os.dup2(duplicate, number)
            with suppress(OSError):
                stream.close()


def give_stdout_back() -> None:
    """The process is about to become another one, which writes to the stdout that this one was given."""
    if _json is not None:
        with suppress(OSError, ValueError):
            os.dup2(_json.fileno(), 1)


def show_error(message: str) -> None:
    """An error, on stderr."""
    echo_styled("error: ", message, fg="red", bold=True)


def echo_styled(prefix: str, message: str, **style: Any) -> None:
    """A line on stderr that begins in a colour."""
    click.echo(click.style(prefix, **style) + plain_lines(from_here(message)), err=True)


def warn(message: str) -> None:
    """A warning, on stderr."""
    echo_styled("warning: ", message, fg="yellow")


def note(message: str) -> None:
    """A line of progress."""
    echo(message, err=True)


def finish_stdout() -> None:
    """Write all that stdout still buffers."""
    try:
        sys.stdout.flush()
    except OSError as error:
        raise _lost(error) from error


def forget_stdout() -> None:
    """Stdout cannot be written: drop what its buffer holds, or Python would report the error once more."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _lost(error: OSError) -> OSError | OutputLost:
    if error.errno == errno.EPIPE:
        return error
    return OutputLost(
        f"stdout cannot be written: {error.strerror or error}", hint="make room, or write to another place"
    )


class _Stdout:
    """Stdout for rich, whose errors are `OutputLost`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        try:
            return sys.stdout.write(text)
        except OSError as error:
            raise _lost(error) from error

    def flush(self) -> None:
        finish_stdout()


def new_console(*, stderr: bool = False) -> Console:
    """Stdout or stderr for rich, through the filter: as wide as the terminal, or COLUMNS if that is set, else 80; no
    colours in a pipe."""
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
    from rich.segment import Segment

    class Filtered:
        def __init__(self, inner: ConsoleRenderable) -> None:
            self.inner = inner

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for text, style, control in console.render(self.inner, options):
                yield Segment(text if control else plain_lines(text), style, control)

    class Filter(RenderHook):
        def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
            return [Filtered(inner) for inner in renderables]

    file: Any = None if stderr else _Stdout()
    result = Console(stderr=stderr, file=file, highlight=False, emoji=False, markup=False)
    result.push_render_hook(Filter())
    return result


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done and how far it is (`fxpipe.messages.saying`). A terminal gets a spinner; a pipe
    gets a line after one second, then every few seconds, and after a minute every half minute.

    Yields a function to call with what is being done.
    """
    from rich.text import Text

    begin, ended, doing = time.monotonic(), threading.Event(), [""]

    def text() -> str:
        return ": ".join(part for part in (what, doing[0], how_far()) if part)

    def show() -> None:
        pause = QUIET if status is None else SPIN
        while not ended.wait(pause):
            tell()
            if status is None:
                pause = AGAIN if time.monotonic() - begin < LONG else LONG / 2

    def tell() -> None:
        if status is not None:
            status.update(Text(plain(text())))
        else:
            note(f"{text()} ({time.monotonic() - begin:.0f} s)")

    def say(text: str) -> None:
        doing[0] = text

    with new_console(stderr=True).status(Text(plain(what))) if sys.stderr.isatty() else nullcontext() as status:
        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield say
        finally:
            ended.set()
            thread.join()


def print_sections(sections: Mapping[str, ShownTable | Sequence[str]], console: Console) -> None:
    """Tables and lines, each below its title; those without any are left out."""
    for title, section in sections.items():
        lines = section.rows if isinstance(section, ShownTable) else section
        if not lines:
            continue
        echo(f"\n{title}")
        if isinstance(section, ShownTable):
            print_columns(section, console)
        else:
            for line in section:
                print_text(console, line)


_GAP = 2
_ELASTIC = 32
"""How wide an elastic column may be before other columns are left out for it."""
_LEAST = 10
"""The least width of an elastic column."""


def print_columns(table: ShownTable, console: Console | None = None, *, whole: bool = False) -> None:
    """A table no wider than the console, by default that of stdout: columns are left out, names shortened, numbers not.

    With `whole` all columns and names stay, although a narrow terminal wraps the lines.
    """
    from rich.text import Text

    console = console or new_console()
    titles, rows = table.written()
    columns = {i: max(len(title), *(_text(row[i]).cell_len for row in rows)) for i, title in enumerate(titles)}
    if not whole:
        columns = _fitting(table.columns, columns, console.width)
    heads = [_aligned(Text(plain(titles[i])), table.columns[i].kind.left, w) for i, w in columns.items()]
    _print_line(Text(" " * _GAP).join(heads), console, "bold")
    _print_line(Text("─" * _wide(columns)), console)
    for row in rows:
        cells = [_aligned(shortened(_text(row[i]), w), table.columns[i].kind.left, w) for i, w in columns.items()]
        _print_line(Text(" " * _GAP).join(cells), console)


def _print_line(line: Text, console: Console, style: str = "") -> None:
    line.rstrip()
    console.print(line, style=style, no_wrap=True, crop=False, overflow="ignore")


def _text(cell: Cell) -> Text:
    """A cell's text, with workers in their colours."""
    from rich.text import Text

    pieces = (cell,) if isinstance(cell, str) else cell
    return Text.assemble(*(mark(piece) if isinstance(piece, int) else plain(piece) for piece in pieces))


def mark(worker: int, after: str = "") -> Text:
    """A worker's number in its colour, the same as on the report's page, with the text after it."""
    from rich.text import Text

    from fxpipe.inspection.report.marks import colour

    return Text(f"{worker}{after}", style=f"bold {colour(worker)}")


def _wide(columns: dict[int, int]) -> int:
    return sum(columns.values()) + _GAP * (len(columns) - 1)


def _fitting(columns: Sequence[Column], full: dict[int, int], room: int) -> dict[int, int]:
    """The width of each column that is shown."""
    widths = {i: min(w, _ELASTIC) if columns[i].kind.elastic else w for i, w in full.items()}
    while _wide(widths) > room and (spare := max(columns[i].spare for i in widths)):
        widths = {i: w for i, w in widths.items() if columns[i].spare != spare}
    elastic = [i for i in widths if columns[i].kind.elastic]
    while _wide(widths) > room and elastic and max(widths[i] for i in elastic) > _LEAST:
        widths[max(elastic, key=widths.__getitem__)] -= 1
    for i in elastic:
        widths[i] = min(full[i], widths[i] + max(0, room - _wide(widths)))
    return widths


def _aligned(text: Text, left: bool, width: int) -> Text:
    blank = " " * (width - text.cell_len)
    return text.append(blank) if left else type(text).assemble(blank, text)


def shortened(text: Text, width: int) -> Text:
    """A text of at most this many characters: the middle of a longer one becomes `…`."""
    over = text.cell_len - width
    if over <= 0:
        return text
    head = (width - 1) // 3
    return type(text).assemble(text[:head] if head else "", "…", text[head + over + 1 :])


def print_text(console: Console, text: str, style: str = "") -> None:
    """Prose, broken between words where the width ends."""
    from rich.text import Text

    for line in textwrap.wrap(plain_lines(text), console.width, break_long_words=False, break_on_hyphens=False):
        console.print(Text(line), style=style, no_wrap=True, crop=False, overflow="ignore")
