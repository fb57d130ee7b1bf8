"""The module tree: modules within modules, each with its own nodes, folded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from markupsafe import Markup

from fxpipe.inspection.report.drawing import content, drawn, folded, look, tag
from fxpipe.inspection.table import Json, plural
from fxpipe.inspection.tables import modules, nodes

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
    by_module, opened = _nodes_of(facts["nodes"]), _opened_first(below)

    def line(name: str, written: list[Any], **more: Any) -> Markup:
        spans = (tag("span", Markup(content(cell)), class_=look) for cell, look in zip(written, looks, strict=True))
        return tag(name, *spans, class_="cells", **more)

    parts: list[Markup] = []
    coming: list[int | Markup] = [*below[None][::-1]]  # modules and text, the last first: levels may be thousands
    while coming:
        part = coming.pop()
        if isinstance(part, Markup):
            parts.append(part)
            continue
        index = part
        inside: list[int | Markup] = [*below[index]]
        if index in by_module:
            hidden = folded(drawn(nodes(by_module[index])))
            summary = tag("summary", plural(len(by_module[index]), "node"), " of its own")
            inside.append(tag("details", summary, hidden) if inside else hidden)
        if not inside:
            parts.append(line("div", cells[index], title=rows[index]["path"]))
            continue
        head = line("summary", cells[index], title=rows[index]["path"])
        whole, end = tag("details", head, open="" if index in opened else None), Markup("</details>")
        parts.append(Markup(whole.removesuffix(end)))
        coming += [end, *inside[::-1]]
    return tag("div", line("div", titles), *parts, class_="tree", id="tree")


def _nodes_of(table: Json) -> dict[int, list[Json]]:
    """Each module's own nodes, with the names of those that they read and that read them."""
    by_module: dict[int, list[Json]] = defaultdict(list)
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    readers: dict[int, list[str]] = defaultdict(list)
    for row in rows:
        for read in row["inputs"] or ():
            readers[read].append(row["name"])
    for index, row in enumerate(rows):
        reads = [rows[read]["name"] for read in row["inputs"] or ()]
        by_module[row["module"] or 0].append(row | {"reads": reads, "read_by": readers[index]})
    return by_module


def _opened_first(below: dict[int | None, list[int]]) -> set[int]:
    opened, level, rows = set[int](), below[None], 1
    while level:
        inside = [child for module in level for child in below[module]]
        if rows + len(inside) > FIRST and opened:
            break
        opened.update(level)
        level, rows = inside, rows + len(inside)
    return {module for module in opened if below[module]}
