"""A traced graph as the exported program that torch.onnx takes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
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
from torch.utils import _pytree as pytree


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
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    outputs = [
        OutputSpec(
            OutputKind.USER_OUTPUT,
            TensorArgument(name=n.name) if isinstance(n, fx.Node) else ConstantArgument(name="", value=n),
            None,
        )
        for n in results
    ]
    output.args = (tuple(results),)
    _, in_spec = pytree.tree_flatten((tuple(range(len(inputs))), {}))
    _, out_spec = pytree.tree_flatten(tuple(range(len(results))))
    module.recompile()
    signature = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    return ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=ExportGraphSignature(input_specs=[*lifted_specs, *specs], output_specs=outputs),
        state_dict={},
        range_constraints={},
        module_call_graph=[ModuleCallEntry(fqn="", signature=signature)],
        constants=dict(constants),
    )


def _fake_like(constant: torch.Tensor, inputs: Sequence[fx.Node]) -> torch.Tensor:
    for node in inputs:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode.from_tensor(constant, static_shapes=True)
    return FakeTensorMode().from_tensor(constant, static_shapes=True)
