"""Rows of the tree for nodes: a node, and under it what it reads and what reads it.

They are most of a page, so they are written without a template and as short as can be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from fxpipe.inspection.report.formats import number, size
from fxpipe.inspection.report.marks import chip

Json = dict[str, Any]

_NAMED = 40
"""Of more nodes next to one only so many are named."""


class NodeRows:
    """The nodes of every module, as rows of the tree.

    Args:
        table: `nodes` of the facts; None if the build does not know them.
    """

    def __init__(self, table: Json | None) -> None:
        self._rows = [] if table is None else [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._of: dict[int, list[int]] = defaultdict(list)
        for index, row in enumerate(self._rows):
            self._of[row["module"] or 0].append(index)
            for read in row["inputs"] or ():
                self._readers[read].append(index)

    def count(self, module: int) -> int:
        """How many nodes a module has of its own."""
        return len(self._of[module])

    def rows(self, module: int, level: int) -> Markup:
        """The nodes of a module, hidden, each with a row under it."""
        return Markup("\n".join(self._node(index, level) for index in self._of[module]))

    def _node(self, index: int, level: int) -> str:
        row = self._rows[index]
        kind = " ".join(filter(None, (row["op"], row["type"])))
        line = ": ".join(filter(None, (row["source"], row["text"])))
        worker = "" if row["worker"] is None else chip(row["worker"])
        chips = "".join(f"<td>{worker if row['phase'] == phase else ''}</td>" for phase in "FB")
        times = "".join(f'<td class="n">{number(row["ms"]) if row["phase"] == phase else ""}</td>' for phase in "FB")
        return (
            f'<tr class="can" aria-expanded="false" data-key="n{index}" aria-level="{level}" hidden>'
            f'<td><div class="where" style="--level:{level - 1}"><div><span class="mono">{escape(row["name"])}</span>'
            f'<span class="kind">{escape(kind)}</span><span class="line">{escape(line)}</span></div></div></td>'
            f'{chips}{times}<td></td><td class="n">{size(row["bytes"])}</td><td></td></tr>'
            f'<tr data-key="d{index}" aria-level="{level + 1}" hidden><td colspan="8">'
            f'<div class="near" style="--level:{level}">{self._links("reads", row["inputs"] or ())}'
            f"{self._links('is read by', self._readers[index])}{_unit(row)}</div></td></tr>"
        )

    def _links(self, label: str, nodes: Sequence[int]) -> str:
        named = ", ".join(
            f'<button type="button" class="link" data-node="{node}">{escape(self._rows[node]["name"])}</button>'
            for node in nodes[:_NAMED]
        )
        more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
        return f"<div>{label} {named or 'nothing'}{more}</div>"


def _unit(row: Json) -> str:
    if row["unit"] is None:
        return ""
    return f"<div>unit {row['unit']}{', makes weight gradients alone' if row['weight'] else ''}</div>"
