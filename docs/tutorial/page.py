"""The tutorial's page, for a terminal or as Markdown; programs are folded to what matters."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WIDTH = 120  # of a line of a program


@dataclass(frozen=True)
class Page:
    """Prints headings, text and code, in order; as Markdown if `markdown` is set."""

    markdown: bool

    def heading(self, text: str, level: int = 2) -> None:
        self._print(f"{'#' * level} {text}" if self.markdown else f"{text}\n{'=' * len(text)}")

    def say(self, text: str) -> None:
        """Paragraphs, written in Markdown."""
        paragraphs = textwrap.dedent(text).strip("\n").split("\n\n")
        self._print("\n\n".join(textwrap.fill(p, WIDTH, break_on_hyphens=False) for p in paragraphs))

    def code(self, text: str, language: str = "") -> None:
        """A block as it is; for a terminal it is indented."""
        body = textwrap.dedent(text).strip("\n").rstrip()
        self._print(f"```{language}\n{body}\n```" if self.markdown else textwrap.indent(body, "    "))

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        cells = [list(titles), *([str(cell) for cell in row] for row in rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
        lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
        lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        self._print("\n".join(lines if self.markdown else (f"    {line}" for line in lines)))

    def _print(self, text: str) -> None:
        print("\n".join(line.rstrip() for line in text.split("\n")), end="\n\n")


def changes(before: str, after: str) -> str:
    """What changed between two texts, line by line: `-` was there, `+` is there now, `…` is the same."""
    old, new = ([shortened(line) for line in text.splitlines()] for text in (before, after))
    lines: list[str] = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            lines += ["  …"]
        else:
            lines += [f"- {line}" for line in old[i:j]] + [f"+ {line}" for line in new[k:m]]
    return "\n".join(lines)


def kept(text: str, wanted: Callable[[str], object]) -> str:
    """The lines that are wanted; `…` for the others between them."""
    lines: list[str] = []
    for line in text.splitlines():
        if wanted(line):
            lines.append(shortened(line))
        elif not lines or lines[-1] != "…":
            lines.append("…")
    return "\n".join(lines)


def shortened(line: str) -> str:
    """A call that is too long for a line, without its arguments in the middle."""
    found = re.fullmatch(r"(.*?\()(.*)(\)  #.*)", line)
    if len(line) <= WIDTH or not found:
        return line
    head, inside, tail = found.groups()
    arguments = re.split(r", (?![^\[]*\])", inside)
    while len(line) > WIDTH and len(arguments) > 2:
        del arguments[-2]
        line = f"{head}{', '.join(arguments[:-1])}, …, {arguments[-1]}{tail}"
    return line
