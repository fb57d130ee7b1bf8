"""The rows of the module tree, and which of them are open at first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fxpipe.inspection.report.nodes import NodeRows

Json = dict[str, Any]

_FIRST = 28
"""Levels are open at first as long as they have no more rows than this."""


@dataclass(frozen=True)
class TreeRow:
    """A row of the tree.

    Attributes:
        module: what the row is about.
        own: how many nodes of the module's own the row is about; 0 if it is about the module as a whole.
        nodes: the rows of the nodes that this row holds.
        opens: whether there is anything to open.
        opened: whether that is open at first.
        hidden: whether a row above it is closed at first.
    """

    key: str
    level: int
    module: Json
    own: int
    nodes: Markup
    opens: bool
    opened: bool
    hidden: bool


class ModuleRows:
    """All rows of the tree but those of nodes, in the order of the page.

    Attributes:
        most: the milliseconds of the widest module next to the top, of forward and of backward.
    """

    def __init__(self, facts: Json) -> None:
        self._modules: list[Json] = facts["modules"]
        self._below: dict[int, list[int]] = defaultdict(list)
        for index, module in enumerate(self._modules):
            if module["parent"] is not None:
                self._below[module["parent"]].append(index)
        self._nodes = NodeRows(facts["nodes"])
        self._open = self._opened_first()
        top = [self._modules[m] for m in self._below[0]]
        self.most = {way: max((milliseconds(m[way]) or 0 for m in top), default=0) for way in ("forward", "backward")}

    def __iter__(self) -> Iterator[TreeRow]:
        if self._modules:
            yield from self._rows(0, 1, hidden=False)

    def _rows(self, index: int, level: int, hidden: bool) -> Iterator[TreeRow]:
        module, below, own = self._modules[index], self._below[index], self._nodes.count(index)
        opened = index in self._open
        nodes = Markup() if below else self._nodes.rows(index, level + 1)
        yield TreeRow(f"m{index}", level, module, 0, nodes, bool(below or own), opened, hidden)
        hidden = hidden or not opened
        for child in below:
            yield from self._rows(child, level + 1, hidden)
        if below and own:
            yield TreeRow(f"o{index}", level + 1, module, own, self._nodes.rows(index, level + 2), True, False, hidden)

    def _opened_first(self) -> set[int]:
        opened, level, rows = {0}, [0], 1
        while level:
            below = [child for module in level for child in self._below[module]]
            if rows + len(below) > _FIRST:
                break
            opened.update(level)
            level, rows = below, rows + len(below)
        return {module for module in opened if self._below[module]}


def milliseconds(places: list[Any]) -> float | None:
    """The time of a module's forward or backward, None if it is not known for any place."""
    times = [place[1] for place in places if place[1] is not None]
    return sum(times) if times else None
