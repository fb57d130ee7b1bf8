"""A stage's code on stdout: what `fxpipe inspect --stage K` prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from fxpipe.messages import plain_lines

_CALL = re.compile(r"\bcomm\.(?:send|recv|all_reduce|reduce_scatter)\(")


def print_stage(source: str) -> None:
    """The code as it is, byte for byte; on a terminal with colours and line numbers, and what concerns others marked.

    A terminal gets no control characters: the file may be a stranger's.

    Args:
        source: the file's text, read with newline="" so that not even line ends change.
    """
    if sys.stdout.isatty():
        _print_coloured(plain_lines(source.expandtabs()))
    else:
        sys.stdout.write(source)


def _print_coloured(source: str) -> None:
    from rich.console import Console
    from rich.syntax import Syntax

    code = Syntax(source, "python", theme="ansi_dark", line_numbers=True, word_wrap=True, background_color="default")
    for line, start, end in _calls(source):
        code.stylize_range("bold reverse", (line, start), (line, end))
    Console().print(code)


def _calls(source: str) -> Iterator[tuple[int, int, int]]:
    """Where it sends, receives and hands over gradients: the line, from 1, and the columns of the call, from 0."""
    for number, line in enumerate(source.split("\n"), 1):
        found = _CALL.search(line)
        if found:
            closing = line.find(")", found.end())
            yield number, found.start(), len(line) if closing < 0 else closing + 1
