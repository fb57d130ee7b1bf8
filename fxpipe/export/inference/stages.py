"""A stage of the chain as an exported program, and as a file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from fxpipe.errors import ExportError, FxpipeError
from fxpipe.export.inference.chain import ChainStage, Port
from fxpipe.export.inference.eval_graph import EvalGraph, place_of
from fxpipe.onnx import model_file
from fxpipe.onnx.convert import convert_exported
from fxpipe.onnx.exported_program import program_of

SMALL = 1024
"""The most elements of a constant that the graph itself holds, so that it can be folded."""

ROOM = 2**26
"""Bytes that a file with weights reserves for the graph."""


@dataclass(frozen=True)
class InferenceStage:
    """One file of the chain."""

    worker: int
    files: tuple[str, ...]  # names in the folder: the model, and its `.data` if the weights are in a file next to it
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: int  # how many ONNX nodes it has
    # the model's own names of its parameters and buffers, including large constants
    weights: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class Writer:
    """Writes stages into a folder."""

    folder: Path
    opset: int
    form: Literal["initializers", "external"]  # of the weights; see `export_inference`
    source: str | None  # name of the user's file

    def stage(self, graph: EvalGraph, stage: ChainStage) -> InferenceStage:
        """Write one stage."""
        name = f"stage_{stage.worker}.inference"
        model, weights = self._converted(name, graph, stage)
        size = sum(t.nbytes for t in weights.values())
        fits = size + model.ByteSize() + ROOM <= model_file.LIMIT
        path = self.folder / f"{name}.onnx"
        count = len(model.graph.node)
        weights_file = model_file.write(path, model, weights, self.form if fits else "external")
        files = (path.name,) if weights_file is None else (path.name, weights_file.name)
        return InferenceStage(stage.worker, files, stage.inputs, stage.outputs, count, tuple(weights))

    def _converted(self, name: str, graph: EvalGraph, stage: ChainStage) -> tuple[onnx.ModelProto, dict[str, Tensor]]:
        program, weights = _program(graph, stage)
        ports = (*stage.inputs, *stage.outputs)
        dims = {p.name: {i: d for i, d in enumerate(p.shape) if isinstance(d, str)} for p in ports}
        names = [*weights, *(p.name for p in stage.inputs)]
        try:
            model = convert_exported(program, names, [p.name for p in stage.outputs], opset=self.opset, dynamic=dims)
        except FxpipeError as error:
            where = error.where or _places(stage, error.what)
            raise ExportError(f"{name}: {error.what}", where=where, hint=error.hint) from error
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            for dimension in value.type.tensor_type.shape.dim:
                if dimension.HasField("dim_param"):
                    dimension.dim_param = graph.dimension(dimension.dim_param)
        model = model_file.named(model, name, self.opset)
        body: dict[str, Any] = {"phase": "inference", "stage": stage.worker, "workers": stage.count}
        body |= {"model": self.source} if self.source else {}
        body["inputs"] = [{"value": p.name, "kind": p.kind} for p in stage.inputs]
        body["outputs"] = [{"value": p.name, "kind": p.kind} for p in stage.outputs]
        words = [*("weight" for _ in weights), *(p.kind for p in stage.inputs)]
        model_file.note(model, body, words, [p.kind for p in stage.outputs])
        return model, weights


def _places(stage: ChainStage, message: str) -> str | None:
    """The user's lines that call the operators named in an error; the conversion itself no longer knows them.

    The error may name a part of the user's operator: `prims.bessel_j0` of `aten.special_bessel_j0`.
    """
    parts = tuple(name.strip("_") for name in re.findall(r"\b(?:aten|prims)\.(\w+)\.\w+", message))
    calls = [n for n in stage.calls if re.sub(r"^\w+\.|\.\w+$", "", str(n.target)).endswith(parts)]
    return "; ".join(dict.fromkeys(place for n in calls if (place := place_of(n)))) or None


def _program(graph: EvalGraph, stage: ChainStage) -> tuple[ExportedProgram, dict[str, Tensor]]:
    """A stage with the weights as its first inputs; and the weights by their own names."""
    new = fx.Graph()
    root = nn.Module()
    mapped: dict[fx.Node, fx.Node] = {}
    constants: dict[str, Any] = {}
    weights: dict[str, Tensor] = {}
    specs: list[InputSpec] = []

    def placeholder(node: fx.Node, kind: InputKind) -> None:
        input_node = mapped[node] = new.placeholder(re.sub(r"\W", "_", node.name))
        input_node.meta = {"val": node.meta["val"]}
        target = input_node.name if kind == InputKind.CONSTANT_TENSOR else None
        specs.append(InputSpec(kind, TensorArgument(name=input_node.name), target))

    read = {n for node in stage.calls for n in node.all_input_nodes} | set(stage.leaves)
    held = [n for n in graph.held if n in read]
    for node in held:
        if _is_folded(graph, node):
            placeholder(node, InputKind.CONSTANT_TENSOR)
            constants[mapped[node].name] = graph.held[node]
    first: dict[str, fx.Node] = {}
    for node in held:
        name = graph.names[node]
        if name in first:  # tied
            mapped[node] = mapped[first[name]]
        elif node not in mapped:
            placeholder(node, InputKind.USER_INPUT)
            first[name] = node
            weights[name] = graph.held[node]
    for node in stage.arrives:
        placeholder(node, InputKind.USER_INPUT)
    for node, (tensor, dimension) in stage.sizes.items():
        mapped[node] = new.call_function(torch.ops.aten.sym_size.int, (mapped[tensor], dimension))
        mapped[node].meta = {"val": node.meta["val"]}
    for node in stage.calls:
        if node.op == "get_attr":
            setattr(root, str(node.target), getattr(graph.program.graph_module, str(node.target)))
        mapped[node] = new.node_copy(node, mapped.__getitem__)
    results = [mapped[n] for n in stage.leaves]
    new.output(tuple(results))
    return program_of(fx.GraphModule(root, new), specs, results, constants, part_of=graph.program), weights


def _is_folded(graph: EvalGraph, node: fx.Node) -> bool:
    """Whether it is a small constant that export made: neither a parameter nor a buffer."""
    signature = graph.program.graph_signature
    return node.name in signature.inputs_to_lifted_tensor_constants and graph.held[node].numel() <= SMALL
