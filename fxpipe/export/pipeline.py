"""The whole partitioned training step as one model: each part of a stage is a function, the main graph calls them.

A viewer then shows the stages, what passes between them, and inside a function the part itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import onnx
from onnx import helper

from fxpipe.export.names import Names
from fxpipe.onnx.repeated_nodes import DOMAIN, constant_node
from fxpipe.stages.pure_part import PartInput, PartOutput, PurePart

Row = TypeVar("Row", PartInput, PartOutput)


@dataclass(frozen=True)
class Entry(Generic[Row]):
    """An input or output of the main graph: its name there, and which part's input or output it is.

    A weight that several parts read is one input; `part` is the first of them.
    """

    name: str
    part: PurePart
    row: Row


@dataclass(frozen=True)
class PipelineModel:
    """The model, and what its inputs and outputs are."""

    model: onnx.ModelProto
    inputs: tuple[Entry[PartInput], ...]
    outputs: tuple[Entry[PartOutput], ...]


@dataclass(frozen=True)
class Converted:
    """A part as a model of its own."""

    part: PurePart
    model: onnx.ModelProto
    metadata: str

    @property
    def inputs(self) -> list[str]:
        return [value.name for value in self.model.graph.input]

    @property
    def outputs(self) -> list[str]:
        return [value.name for value in self.model.graph.output]


def assemble(parts: Sequence[Converted]) -> PipelineModel:
    """The step for one microbatch, from the parts in the order in which they run.

    Loss, gradients and new values of buffers are its outputs; weights, buffers, batch and masks its inputs.
    """
    graph = _MainGraph()
    for part in parts:
        graph.call(part)
    main = helper.make_graph(graph.nodes, "pipeline", graph.infos, graph.results, value_info=graph.inner)
    opsets = _opsets([p.model for p in parts])
    model = helper.make_model(
        main,
        functions=[function for p in parts for function in (*p.model.functions, function_of(p))],
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        ir_version=max(p.model.ir_version for p in parts),
    )
    return PipelineModel(model, tuple(graph.inputs), tuple(graph.outputs))


def function_of(converted: Converted) -> onnx.FunctionProto:
    """A part as a function: its constants become nodes, its weights are inputs."""
    graph = converted.model.graph
    function = onnx.FunctionProto(name=converted.part.name, domain=DOMAIN)
    function.input.extend(converted.inputs)
    function.output.extend(converted.outputs)
    function.node.extend(map(constant_node, graph.initializer))
    function.node.extend(graph.node)
    function.value_info.extend(graph.value_info)
    function.opset_import.extend(converted.model.opset_import)
    function.metadata_props.add(key="fxpipe", value=converted.metadata)
    return function


def _opsets(models: Sequence[onnx.ModelProto]) -> dict[str, int]:
    opsets = {DOMAIN: 1}
    for model in models:
        for entry in model.opset_import:
            assert opsets.setdefault(entry.domain, entry.version) == entry.version, "parts of different opsets"
    return opsets


class _MainGraph:
    """The main graph, call by call."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        self.results: list[onnx.ValueInfoProto] = []
        self.inner: list[onnx.ValueInfoProto] = []
        self.inputs: list[Entry[PartInput]] = []
        self.outputs: list[Entry[PartOutput]] = []
        self.existing: dict[tuple[str, ...], str] = {}  # names of existing values, by key
        self.names = Names()

    def call(self, converted: Converted) -> None:
        part, graph = converted.part, converted.model.graph
        read = [self._input(part, r, v) for r, v in zip(part.inputs, graph.input, strict=True)]
        outputs = [self._output(part, r, v) for r, v in zip(part.outputs, graph.output, strict=True)]
        node = helper.make_node(part.name, read, outputs, name=part.name, domain=DOMAIN)
        node.metadata_props.add(key="fxpipe", value=converted.metadata)
        self.nodes.append(node)

    def _input(self, part: PurePart, row: PartInput, info: onnx.ValueInfoProto) -> str:
        key = self._key(part, row)
        if key not in self.existing:
            name = f"{part.name}.{row.name}" if row.kind == "mask" else row.name
            self.existing[key] = self.names.free(row.kind, name)
            self.inputs.append(Entry(self.existing[key], part, row))
            self.infos.append(_renamed(info, self.existing[key]))
        return self.existing[key]

    def _output(self, part: PurePart, row: PartOutput, info: onnx.ValueInfoProto) -> str:
        if row.kind in ("loss", "gradient", "update"):
            name = self.names.free(row.kind, row.name)
            self.outputs.append(Entry(name, part, row))
            self.results.append(_renamed(info, name))
        else:
            name = self.names.free(row.kind, row.name if row.kind == "sent" else f"stage_{part.worker}.{row.name}")
            self.inner.append(_renamed(info, name))
        if row.kind != "gradient":
            self.existing[self._key(part, row)] = name  # a buffer's later readers see its new value
        return name

    def _key(self, part: PurePart, row: PartInput | PartOutput) -> tuple[str, ...]:
        """A key that is the same for an output and for the inputs that it becomes."""
        if row.kind in ("sent", "received"):
            return "edge", row.name
        if row.kind in ("buffer", "update"):
            return "buffer", row.name
        if row.kind in ("weight", "batch"):
            return row.kind, row.name
        return row.kind, part.name if row.kind == "mask" else str(part.worker), row.name


def _renamed(info: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(info)
    copy.name = name
    return copy
