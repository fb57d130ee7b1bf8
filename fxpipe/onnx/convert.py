"""A pure graph of ATen calls as an ONNX model.

graph ─our decompositions, torch's─→ decomposed graph ─→ ExportedProgram ─torch.onnx─→ names, checks ─→ ModelProto
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir
import torch
from onnxscript import optimizer
from torch import fx
from torch.export import ExportedProgram

from fxpipe.errors import ExportError
from fxpipe.onnx.decompose import check_operators, decompose, decomposition_table, refused
from fxpipe.onnx.decompositions import recurrent
from fxpipe.onnx.exported_program import exported_program
from fxpipe.torch_private import composite_operators


def convert(
    module: fx.GraphModule,
    examples: Sequence[torch.Tensor],
    input_names: Sequence[str],
    output_names: Sequence[str],
    *,
    opset: int = 20,
) -> onnx.ModelProto:
    """The module as an ONNX model with static shapes: inputs and outputs in order, under the names given.

    The module has functional ATen calls; every tensor it reads is a placeholder, its output a tuple of tensors. Of the
    examples, one for each placeholder, shape, strides and dtype count; they may be fake. An unused placeholder stays an
    input of the model. An output that is an input, or occurs twice, is copied.
    """
    with quiet():
        decomposed = decompose(module, examples, decomposition_table())
        check_operators(decomposed)
        return _to_onnx(exported_program(decomposed), input_names, output_names, opset=opset)


def convert_exported(
    program: ExportedProgram,
    input_names: Sequence[str],
    output_names: Sequence[str],
    *,
    opset: int = 20,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
) -> onnx.ModelProto:
    """An inference program of `torch.export.export` as an ONNX model; dimensions that it leaves open stay open.

    `dynamic` names them: input or output → dimension → name, as `{"x": {0: "batch"}}`.
    """
    with quiet():
        _look_for_operators_again()
        # Only ATen's own backward kernels and the like; the user's composite calls go to torch.onnx unchanged.
        with refused(program.graph):
            program = program.run_decompositions(dict(decomposition_table()))
        check_operators(program.graph_module)
        return _to_onnx(program, input_names, output_names, opset=opset, dynamic=dynamic)


def _to_onnx(
    program: ExportedProgram,
    input_names: Sequence[str],
    output_names: Sequence[str],
    *,
    opset: int,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
) -> onnx.ModelProto:
    _look_for_operators_again()
    with refused(program.graph):
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            optimize=False,
            verbose=False,
            custom_translation_table={recurrent.LAYER: recurrent.translated},
        )
        if exported is not None:
            optimizer.optimize(exported.model, num_iterations=1)  # torch's own second finds hardly anything more
    assert exported is not None
    model = exported.model
    name_values(model.graph, input_names, output_names, dynamic or {})
    strip_notes(model)
    proto = ir.to_proto(model)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:
        raise ExportError(f"the ONNX model is not valid: {error}") from error
    return proto


def _look_for_operators_again() -> None:
    """From its first export torch remembers which operators are composite; later composite operators make it fail."""
    composite_operators.cache_clear()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch.onnx neither warns nor logs anything below an error."""
    loggers = [logging.getLogger(n) for n in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    loggers += [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.startswith(("torch.onnx.", "onnxscript.", "onnx_ir."))
    ]
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        for logger in loggers:
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def name_values(
    graph: ir.Graph, input_names: Sequence[str], output_names: Sequence[str], dynamic: Mapping[str, Mapping[int, str]]
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
