"""A part's graph for inputs and outputs whose memory has no gaps, as engines take and return them."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxpipe.errors import BackendError
from fxpipe.ir.program import copy_graph
from fxpipe.plan.packing import Layout
from fxpipe.stages.pure_part import PurePart

aten = torch.ops.aten


def has_strides(x: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether a tensor is plain memory with these strides."""
    return x.stride() == stride and not x.is_conj() and not x.is_neg()


def copied(x: Tensor, layout: Layout) -> Tensor:
    """A copy of `x` in its layout."""
    return layout.empty(x.device).copy_(x)


def layouts(part: PurePart) -> tuple[list[Layout], list[Layout]]:
    """Of its inputs and its outputs, as engines take and return them."""
    inputs, outputs = ([Layout(row.tensor, row.name) for row in rows] for rows in (part.inputs, part.outputs))
    return inputs, outputs


def for_layouts(part: PurePart, engine: str) -> fx.GraphModule:
    """The graph for inputs and outputs without gaps; the strides differ from the traced ones if these have gaps."""
    inputs, outputs = layouts(part)
    graph = copy_graph(part.graph.graph)
    for node in graph.nodes:
        node.meta.clear()  # the strides it was traced with
        node.type = None  # code with an annotation that is text cannot be saved
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # an engine's strides can differ from the traced ones
    if any(i.tensor.stride != tuple(layout.stride) for i, layout in zip(part.inputs, inputs, strict=True)):
        for node in graph.nodes:
            if node.target is aten.as_strided.default:
                raise BackendError(f"{engine} cannot run {part.name}: as_strided, and inputs that are views")
    end = graph.output_node()
    results = list(end.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(end):
        for i, (output, layout) in enumerate(zip(part.outputs, outputs, strict=True)):
            if output.tensor.stride != tuple(layout.stride):
                results[i] = graph.call_function(aten.clone.default, (results[i],))
    end.args = (tuple(results),)
    return fx.GraphModule(part.graph, graph)
