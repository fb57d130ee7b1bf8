"""The program's nodes, as columns and rows."""

from __future__ import annotations

from typing import Any

from fxpipe.inspection.modules import ModuleTree
from fxpipe.inspection.subject import Subject
from fxpipe.ir.program_table import Row

COLUMNS = list(Row._fields)
MODULE = COLUMNS.index("module")


def node_table(subject: Subject, tree: ModuleTree) -> dict[str, Any]:
    """The columns of `fxpipe.ir.program_table.Row`, but the module's row instead of its path.

    `gradients` has the row that makes a parameter's gradient, by the name of the parameter's row; `names`, likewise,
    what the model calls parameters, buffers and inputs.
    """
    rows = []
    for node in subject.nodes.rows:
        row: list[Any] = [*node[:-1], list(node.inputs)]
        row[MODULE] = tree.of(node.module, node.unit)
        rows.append(row)
    names = {row: list(found) for row, found in subject.nodes.names.items()}
    return {"columns": COLUMNS, "rows": rows, "gradients": dict(subject.nodes.gradients), "names": names}
