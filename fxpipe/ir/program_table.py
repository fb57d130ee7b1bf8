"""The program after its last pass as plain rows, one per node: what a build keeps for `fxpipe inspect`.

`nodes.json` is this table. A run does not need it, and it needs no torch to be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fxpipe.errors import BuildError
from fxpipe.plan.plan import holder_of
from fxpipe.plan.spec import Phase
from fxpipe.typed_json import Malformed, convert, explained, parse

if TYPE_CHECKING:
    from torch import fx

    from fxpipe.ir.program import Program
    from fxpipe.plan.plan import Plan

FORMAT = 1


class Row(NamedTuple):  # a tuple: there are tens of thousands
    """One node.

    Attributes:
        name: the node's; the value has it in the emitted stages, too.
        phase: F or B; None for a placeholder.
        module: path of the module it belongs to; '' outside all modules, and for the model's own code.
        op: `aten.mm`, `getitem`, `send`, `recv`; for a placeholder `parameter`, `buffer` or `input`.
        type: `f32[4, 128]`.
        bytes: size of its value(s).
        ms: its cost; None for a placeholder.
        worker: where it runs; for a parameter its owner, for a buffer its home, for an input worker 0.
        unit: number of its unit; None for a placeholder.
        weight: whether it makes only weight gradients (W).
        source, text: the user's line, `gpt.py:51` and its text; for a placeholder its names in the model.
        inputs: the rows that it reads.
    """

    name: str
    phase: Phase | None
    module: str
    op: str
    type: str
    bytes: int
    ms: float | None
    worker: int
    unit: int | None
    weight: bool
    source: str | None
    text: str
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class ProgramTable:
    """All nodes, inputs before their readers.

    Attributes:
        sends: the row in which each edge of the plan is sent, by the edge's name.
        gradients: the row that makes each trained parameter's gradient, by the name of the parameter's row.
        names: the model's names for a placeholder, by the name of its row; several for a tied parameter.
    """

    rows: tuple[Row, ...] = field(repr=False)
    sends: Mapping[str, int] = field(default_factory=dict, repr=False)
    gradients: Mapping[str, int] = field(default_factory=dict, repr=False)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    def to_json(self) -> str:
        """Stable text, one line per row; `read_table` reads it back to an equal table."""
        head = {"format": FORMAT, "columns": list(Row._fields)}
        rows = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in self.rows)
        tail = {"sends": dict(self.sends), "gradients": dict(self.gradients), "names": dict(self.names)}
        more = json.dumps(tail, ensure_ascii=False, separators=(",", ":"))[1:]
        return f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n], {more}\n'


def read_table(path: Path) -> ProgramTable:
    """Read a file that has the text of `ProgramTable.to_json`.

    Raises:
        BuildError: it does not exist, is not JSON, or has another form.
    """
    with explained(path, error=BuildError, hint="compile again, or delete it: a run does not need it"):
        body = parse(path)
        if isinstance(body, dict) and "format" in body and "columns" in body:
            if (body.pop("format"), body.pop("columns")) != (FORMAT, list(Row._fields)):
                raise Malformed(f"it is not of format {FORMAT}, or it has other columns", ", $")
        else:
            raise Malformed("format or columns are missing", ", $")
        table = convert(body, ProgramTable)
        for i, row in enumerate(table.rows):
            if row.worker < 0 or not all(0 <= n < i for n in row.inputs):
                raise Malformed("a row's worker or inputs are missing", f", $.rows[{i}]")
        for i in (*table.sends.values(), *table.gradients.values()):
            if not 0 <= i < len(table.rows):
                raise Malformed(f"there is no row {i}", ", $")
    return table


def table_of(program: Program, plan: Plan) -> ProgramTable:
    """The rows of a program that has been through every pass, and its plan's owners and homes."""
    from fxpipe.ir.wire import is_send

    names = _names(program)
    placeholders = {row.name: row for row in _placeholders(program, plan, names)}
    numbers: dict[fx.Node, int] = {}
    rows: list[Row] = []
    sends: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        numbers[node] = len(rows)
        if node.op == "placeholder":
            rows.append(placeholders[node.name])
            continue
        if is_send(node):
            sends[program.wires[node.name].name] = len(rows)
        rows.append(_call(node, tuple(numbers[n] for n in node.all_input_nodes)))
    gradients = {parameter: numbers[gradient] for parameter, gradient in program.gradients().items()}
    return ProgramTable(tuple(rows), sends, gradients, names)


def _call(node: fx.Node, inputs: tuple[int, ...]) -> Row:
    from fxpipe.ir.printer import type_text
    from fxpipe.ir.program import info, size_of
    from fxpipe.ir.wire import is_reduce

    record = info(node)
    example = node.meta.get("val")
    return Row(
        name=node.name,
        phase=record.phase,
        module=record.module,
        op=_op(node),
        type="" if is_reduce(node) else type_text(example),
        bytes=size_of(example) if record.bytes is None else record.bytes,
        ms=1e3 * (record.seconds or 0.0),
        worker=record.worker or 0,
        unit=record.unit,
        weight=record.weight,
        source=record.source,
        text=record.text,
        inputs=inputs,
    )


def _op(node: fx.Node) -> str:
    from fxpipe.ir.wire import is_recv, is_send
    from fxpipe.torch_private import OpOverload

    if is_send(node) or is_recv(node):
        return "send" if is_send(node) else "recv"
    target: Any = node.target
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def _names(program: Program) -> dict[str, tuple[str, ...]]:
    """The model's names for its parameters, buffers and inputs, by node."""
    names = {p.node: p.names for p in program.parameters}
    names |= {b.node: b.names for b in program.buffers}
    return names | {b.node: (b.leaf.name,) for b in program.batch if b.node is not None}


def _placeholders(program: Program, plan: Plan, names: Mapping[str, tuple[str, ...]]) -> Iterator[Row]:
    from fxpipe.ir.printer import type_text
    from fxpipe.ir.program import size_of

    owners = {p.name: p.owner for p in plan.parameters}
    homes = {b.name: b.home if b.home is not None else b.workers[0] for b in plan.buffers}
    entries: list[tuple[str, str, int]] = []
    entries += [(p.node, "parameter", owners[p.names[0]]) for p in program.parameters]
    entries += [(b.node, "buffer", homes[b.names[0]]) for b in program.buffers]
    entries += [(b.node, "input", 0) for b in program.batch if b.node is not None]
    nodes = program.placeholders
    for name, op, worker in entries:
        example = nodes[name].meta["val"]
        first = holder_of(names[name], owners) or names[name][0]  # of what says how a weight is packed
        module = "" if op == "input" else first.rpartition(".")[0]
        yield Row(
            name, None, module, op, type_text(example), size_of(example), None, worker, None, False, None,
            ", ".join(names[name]), (),
        )  # fmt: skip
