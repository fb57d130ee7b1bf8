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
from fxpipe.onnx.graph_values import name_values, strip_notes
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
