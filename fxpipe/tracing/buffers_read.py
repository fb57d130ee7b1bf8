"""Which buffers the outputs of a program depend on."""

from __future__ import annotations

from fxpipe.ir.program import Program


def buffers_read(program: Program) -> set[str]:
    """The first names of the buffers that outputs depend on."""
    (output,) = program.graph.find_nodes(op="output")
    needed, stack = {output}, [output]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in needed:
                needed.add(node)
                stack.append(node)
    return {b.names[0] for b in program.buffers if program.placeholders[b.node] in needed}
