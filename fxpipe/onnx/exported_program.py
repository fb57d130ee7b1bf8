"""A traced graph as the exported program that torch.onnx takes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from fxpipe.torch_private import FakeTensorMode, pytree


def exported_program(module: fx.GraphModule) -> ExportedProgram:
    """The graph as an exported program, without tracing it again."""
    graph = module.graph
    constants: dict[str, torch.Tensor] = {}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    specs = [InputSpec(InputKind.USER_INPUT, TensorArgument(name=n.name), None) for n in inputs]
    lifted: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        name = str(node.target)
        if name not in lifted:
            constants[name] = operator.attrgetter(name)(module)
            with graph.inserting_before(inputs[0] if inputs else next(iter(graph.nodes))):
                lifted[name] = graph.placeholder("constant_" + name.replace(".", "_"))
            lifted[name].meta["val"] = node.meta.get("val", _fake_like(constants[name], inputs))
        node.replace_all_uses_with(lifted[name])
        graph.erase_node(node)
    lifted_specs = [
        InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), name) for name, node in lifted.items()
    ]
    output = graph.output_node()
    results: tuple[Any, ...] = tuple(output.args[0])  # type: ignore[arg-type]
    output.args = (results,)
    module.recompile()
    return program_of(module, [*lifted_specs, *specs], results, constants)


def program_of(
    module: fx.GraphModule,
    inputs: Sequence[InputSpec],
    results: Sequence[Any],
    constants: Mapping[str, Any],
    part_of: ExportedProgram | None = None,
) -> ExportedProgram:
    """A graph as an exported program with the open sizes of the one it is part of; without one, all sizes are fixed."""
    outputs = [
        OutputSpec(
            OutputKind.USER_OUTPUT,
            TensorArgument(name=n.name) if isinstance(n, fx.Node) else ConstantArgument(name="", value=n),
            None,
        )
        for n in results
    ]
    count = sum(spec.kind == InputKind.USER_INPUT for spec in inputs)
    _, in_spec = pytree.tree_flatten((tuple(range(count)), {}))
    _, out_spec = pytree.tree_flatten(tuple(range(len(results))))
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=ExportGraphSignature(input_specs=list(inputs), output_specs=outputs),
        state_dict={},
        range_constraints=dict(part_of.range_constraints) if part_of else {},
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
        constants=dict(constants),
        verifiers=part_of.verifiers if part_of else None,
    )


def _fake_like(constant: torch.Tensor, inputs: Sequence[fx.Node]) -> torch.Tensor:
    for node in inputs:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode.from_tensor(constant, static_shapes=True)
    return FakeTensorMode().from_tensor(constant, static_shapes=True)
