"""How commands speak: data to stdout, progress and warnings to stderr, one JSON object with --json."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from fxpipe.planner.quantity import size

__all__ = ["emit_json", "note", "print_table", "size", "warn", "working"]

QUIET = 1.0
"""Seconds between two lines of progress in a pipe."""


def emit_json(data: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(data))


def warn(message: str) -> None:
    click.echo(click.style("warning: ", fg="yellow") + message, err=True)


def note(message: str) -> None:
    """A line of progress."""
    click.echo(message, err=True)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Say on stderr what takes a while: a spinner on a terminal; in a pipe a line now and then, after the first second.

    Gives a function that is told what is being done.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if sys.stderr.isatty():
        with console.status(what) as status:
            yield status.update
        return
    last = time.monotonic()
    waiting: threading.Timer | None = None

    def say(text: str) -> None:
        nonlocal last, waiting
        if waiting is not None:
            waiting.cancel()
        rest = max(QUIET - (time.monotonic() - last), 0.0)
        waiting = threading.Timer(rest, tell, [text])  # what is done within a second need not be told
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

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = Console().width if sys.stdout.isatty() else 0
    Console(width=max(width, 160)).print(table, soft_wrap=True)  # a narrow terminal wraps lines, never words
