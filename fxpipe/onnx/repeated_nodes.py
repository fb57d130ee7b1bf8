"""Nodes that a model repeats, such as its blocks, as calls of a local function: viewers show a block as one node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import helper

from fxpipe.ir.repeats import EqualRun, LabelledCall, repeats

DOMAIN = "fxpipe"
"""The ONNX domain of the functions."""
LEAST_NODES, LEAST_SAVED = 8, 12
"""How many nodes a function has at least; how many nodes a model saves by it, about."""


def with_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a function for each group of equal runs of nodes; what a run reads and makes may differ in name.

    Constants are part of a function, and weights its inputs.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    infos = {info.name: info for info in (*graph.input, *graph.output, *graph.value_info)}
    ends = {info.name for info in graph.output}
    groups = list(repeats(list(_calls(graph, constants, infos)), ends, LEAST_NODES, LEAST_SAVED))
    groups.sort(key=lambda runs: runs[0].start)
    if not groups:
        return model
    calls: dict[int, tuple[EqualRun, str]] = {}
    for number, runs in enumerate(groups, start=1):
        name = f"{graph.name}.block_{number}"
        model.functions.append(_function(name, model, runs[0], constants, infos))
        calls |= {run.start: (run, name) for run in runs}
    nodes, place = list[onnx.NodeProto](), 0
    while place < len(graph.node):
        run, name = calls.get(place, (None, ""))
        if run is None:
            nodes.append(graph.node[place])
            place += 1
        else:
            nodes.append(helper.make_node(name, run.inputs, run.results, name=f"{name}.{place}", domain=DOMAIN))
            place += run.length
    _replace(graph.node, nodes)
    used = {name for node in graph.node for name in (*node.input, *node.output)} | ends
    _replace(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in used])
    _replace(graph.value_info, [info for info in graph.value_info if info.name in used])
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return model


def constant_node(tensor: onnx.TensorProto) -> onnx.NodeProto:
    """A constant of a graph as a node, as functions have them."""
    return helper.make_node("Constant", [], [tensor.name], name=tensor.name, value=tensor)


def _replace(field: object, members: Sequence[object]) -> None:
    """Give a repeated field of a message other members."""
    copies = list(members)
    del field[:]  # type: ignore[attr-defined]
    field.extend(copies)  # type: ignore[attr-defined]


def _calls(
    graph: onnx.GraphProto, constants: Mapping[str, onnx.TensorProto], infos: Mapping[str, onnx.ValueInfoProto]
) -> Iterator[LabelledCall]:
    """The nodes for the finder. Nodes with graphs of their own, which may read any value, are part of no run."""
    contents: dict[str, bytes] = {}

    def described(name: str) -> object:
        if name not in constants:
            return infos[name].type.SerializeToString(deterministic=True) if name in infos else name
        if name not in contents:
            tensor = onnx.TensorProto()
            tensor.CopyFrom(constants[name])
            tensor.ClearField("name")
            contents[name] = tensor.SerializeToString(deterministic=True)
        return contents[name]

    for node in graph.node:
        kinds = {attribute.type for attribute in node.attribute}
        if kinds & {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS}:
            yield LabelledCall(None, tuple(node.input), tuple(node.output))
            continue
        attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
        types = tuple(map(described, node.input)), tuple(map(described, node.output))
        label = node.op_type, node.domain, tuple(attributes), types
        reads = tuple(name for name in node.input if name and name not in constants)
        yield LabelledCall(label, reads, tuple(filter(None, node.output)))


def _function(
    name: str,
    model: onnx.ModelProto,
    run: EqualRun,
    constants: Mapping[str, onnx.TensorProto],
    infos: Mapping[str, onnx.ValueInfoProto],
) -> onnx.FunctionProto:
    """The function of a run, with the names that values have there."""
    nodes = model.graph.node[run.start : run.start + run.length]
    function = onnx.FunctionProto(name=name, domain=DOMAIN)
    function.input.extend(run.inputs)
    function.output.extend(run.results)
    names = dict.fromkeys(read for node in nodes for read in node.input if read in constants)
    function.node.extend(constant_node(constants[read]) for read in names)
    function.node.extend(nodes)
    inner = (value for node in nodes for value in node.output if value in infos and value not in run.results)
    function.value_info.extend(infos[value] for value in inner)
    function.opset_import.extend(model.opset_import)
    return function
