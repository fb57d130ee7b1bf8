"""Which buffers the metrics of evaluations depend on: only these are carried from batch to batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from fxpipe.ir.program import Program, value


def buffers_carried(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Evaluations of one model, each for a shape of batch, without new values of buffers that no metric depends on.

    A metric may depend on what an earlier batch, of any shape, left in a buffer. So a buffer is carried if a metric
    reads it, or if the new value of a carried buffer reads it.
    """
    read: set[str] = set()
    before: set[str] | None = None
    while before != read:
        before = set(read)
        for program in programs:
            names = {b.node: b.names[0] for b in program.buffers}
            new = [n for node, n in program.updates().items() if names[node] in before]
            needed = _needed([*program.metrics().values(), *new])
            read |= {names[node] for node in names if program.placeholders[node] in needed}
    return tuple(_with_buffers(program, read) for program in programs)


def _needed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    needed = set(nodes)
    stack = list(needed)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in needed:
                needed.add(node)
                stack.append(node)
    return needed


def _with_buffers(program: Program, names: set[str]) -> Program:
    """The program with the new values of only these buffers."""
    first = {b.node: b.names[0] for b in program.buffers}
    dropped = [first[o.target] for o in program.outputs if o.kind == "buffer" and first[o.target] not in names]
    if not dropped:
        return program
    program = program.copy()
    pairs = zip(program.output_nodes, program.outputs, strict=True)
    outputs = [(node, o) for node, o in pairs if o.kind != "buffer" or first[o.target] in names]
    output = program.graph.output_node()
    output.args = (tuple(node for node, _ in outputs),)
    output.meta["val"] = tuple(value(node) for node, _ in outputs)
    notes = [f"it changes buffer {name}: no metric reads it, and the change is not kept" for name in dropped]
    return replace(program, outputs=tuple(o for _, o in outputs), warnings=(*program.warnings, *notes))
