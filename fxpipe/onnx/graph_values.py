"""Values of an ONNX graph: inputs and outputs get their names, and the rest shows nothing of the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from fxpipe.errors import ExportError


def name_values(
    graph: ir.Graph,
    input_names: Sequence[str],
    output_names: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]],
) -> None:
    if len(graph.inputs) != len(input_names) or len(graph.outputs) != len(output_names):
        raise ExportError(
            f"{len(graph.inputs)} inputs and {len(graph.outputs)} outputs, "
            f"but {len(input_names)} and {len(output_names)} names"
        )
    # An output that is an input, a constant, or occurs twice is copied: each name is a value of its own.
    seen: set[int] = set()
    for i, value in enumerate(list(graph.outputs)):
        if value is None or value.dtype is None:
            raise ExportError(f"output {output_names[i]!r} is not a tensor")
        if value.producer() is None or id(value) in seen:
            copy = ir.node("Identity", [value])
            graph.append(copy)
            graph.outputs[i] = copy.outputs[0]
            copy.outputs[0].dtype, copy.outputs[0].shape = value.dtype, value.shape
        seen.add(id(graph.outputs[i]))
    taken = {*input_names, *output_names}
    if len(taken) != len(input_names) + len(output_names):
        raise ExportError("an input or output name occurs twice")
    ends = [*graph.inputs, *graph.outputs]
    used = taken | {value.name for value in _values(graph)}
    number = 0
    for value in _values(graph):
        if value.name in taken and not any(value is end for end in ends):
            while f"{value.name}_{number}" in used:
                number += 1
            value.name = f"{value.name}_{number}"
            used.add(value.name)
    for i, value in enumerate(ends):  # in two steps: if two swap names directly, both have one name for a moment
        value.name = f"fxpipe_end_{i}"
    for value, name in zip(ends, [*input_names, *output_names], strict=True):
        value.name = name
        for dimension, symbol in dynamic.get(name, {}).items():
            assert value.shape is not None
            value.shape = ir.Shape([symbol if i == dimension else d for i, d in enumerate(value.shape)])


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from list(graph.initializers.values())
    for node in ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs


def strip_notes(model: ir.Model) -> None:
    """Drop what torch.onnx notes of the machine: stack traces with paths, names of its tracer."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.doc_string = model.graph.doc_string = None
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
