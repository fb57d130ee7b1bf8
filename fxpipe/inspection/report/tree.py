"""The module tree: modules within modules, each with its own nodes, folded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from markupsafe import Markup

from fxpipe.inspection.formats import plural
from fxpipe.inspection.report.drawing import folded, tag
from fxpipe.inspection.report.tables import content, drawn, look
from fxpipe.inspection.tables import modules, nodes

Json = dict[str, Any]

FIRST = 28
"""At first, levels are open as long as they have no more rows than this."""


def tree(facts: Json) -> Markup:
    """All modules, with their folded nodes."""
    rows: list[Json] = facts["modules"]
    model = facts["build"]["model"] or "the model"
    table = modules([row | {"label": row["name"] or model} for row in rows])
    looks, (titles, cells) = [look(column) for column in table.columns], table.written()
    below: dict[int | None, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        below[row["parent"]].append(index)
    own, opened = _nodes_of(facts["nodes"]), _opened_first(below)

    def line(name: str, written: list[Any], **more: Any) -> Markup:
        spans = (tag("span", Markup(content(cell)), class_=look) for cell, look in zip(written, looks, strict=True))
        return tag(name, *spans, class_="cells", **more)

    def module(index: int) -> Markup:
        inside = [module(child) for child in below[index]]
        if index in own:
            hidden = folded(drawn(nodes(own[index])))
            summary = tag("summary", plural(len(own[index]), "node"), " of its own")
            inside.append(tag("details", summary, hidden) if inside else hidden)
        if not inside:
            return line("div", cells[index], title=rows[index]["path"])
        head = line("summary", cells[index], title=rows[index]["path"])
        return tag("details", head, *inside, open="" if index in opened else None)

    return tag("div", line("div", titles), *map(module, below[None]), class_="tree", id="tree")


def _nodes_of(table: Json) -> dict[int, list[Json]]:
    """Each module's own nodes, with the names of those that they read and that read them."""
    found: dict[int, list[Json]] = defaultdict(list)
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    readers: dict[int, list[str]] = defaultdict(list)
    for row in rows:
        for read in row["inputs"] or ():
            readers[read].append(row["name"])
    for index, row in enumerate(rows):
        reads = [rows[read]["name"] for read in row["inputs"] or ()]
        found[row["module"] or 0].append(row | {"reads": reads, "read_by": readers[index]})
    return found


def _opened_first(below: dict[int | None, list[int]]) -> set[int]:
    opened, level, rows = set[int](), below[None], 1
    while level:
        inside = [child for module in level for child in below[module]]
        if rows + len(inside) > FIRST and opened:
            break
        opened.update(level)
        level, rows = inside, rows + len(inside)
    return {module for module in opened if below[module]}
