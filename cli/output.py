"""How commands speak: data to stdout, progress and warnings to stderr, one JSON object with --json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click


def emit_json(data: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(data))


def warn(message: str) -> None:
    click.echo(click.style("warning: ", fg="yellow") + message, err=True)


def note(message: str) -> None:
    """A line of progress."""
    click.echo(message, err=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say on stderr what takes a while; a spinner on a terminal, nothing in a pipe."""
    from rich.console import Console

    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield
        return
    with console.status(what):
        yield


def size(count: float) -> str:
    """`1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def print_table(headers: list[str], rows: list[list[str]], left: int = 1) -> None:
    """A table on stdout; the first `left` columns are text, the others numbers. Wide enough for its content."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = Console().width if sys.stdout.isatty() else 0
    Console(width=max(width, 160)).print(table, soft_wrap=True)  # a narrow terminal wraps lines, never words
