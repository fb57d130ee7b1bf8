"""Layers of recurrent modules: ONNX has LSTM and GRU; the rest, and what trains them, is written step by step."""

from __future__ import annotations

from typing import Any

import torch
from onnx import TensorProto, helper
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops.core import aten_gru, aten_lstm
from torch import Tensor, fx

from fxpipe.ir.recurrent_layer import LayerCall, differentiated
from fxpipe.torch_private import Decompositions, autograd_in_kernel, disable_current_modes, make_fx
from fxpipe.tracing.recurrent import by_steps, trainable

LAYER = torch.ops.fxpipe.recurrent_layer.default


def _layer(kind: str, input: Tensor, hidden: list[Tensor], weights: list[Tensor], biases: bool) -> Any:
    sizes = {state.shape[2] for state in hidden}
    if kind in ("lstm", "gru") and len(sizes) == 1:  # no projection
        return NotImplemented
    empty = [input.new_empty(0, dtype=torch.uint8)] * 2
    with trainable():
        return [*by_steps(kind, input, hidden, weights, biases), *empty]


def _backward(
    gradients: list[Tensor | None],
    results: list[Tensor],
    kind: str,
    input: Tensor,
    hidden: list[Tensor],
    weights: list[Tensor],
    biases: bool,
) -> list[Tensor]:
    """The layer computed again, step by step, and its gradients."""
    tensors = [input, *hidden, *weights]
    known_gradients = [gradient for gradient in gradients if gradient is not None]

    def traced(*values: Tensor) -> Any:
        of = iter(values)
        call = LayerCall(kind, next(of), [next(of) for _ in hidden], [next(of) for _ in weights], biases)
        filled = [None if gradient is None else next(of) for gradient in gradients]
        return differentiated(lambda layer: by_steps(*layer), call, filled)

    with disable_current_modes(), autograd_in_kernel(), trainable():
        graph = make_fx(traced, tracing_mode="fake")(
            *(torch.zeros(value.shape, dtype=value.dtype) for value in (*tensors, *known_gradients))
        )
    return list(fx.Interpreter(graph).run(*(value.contiguous() for value in (*tensors, *known_gradients))))


def translated(kind: str, input: Any, hidden: Any, weights: Any, biases: bool) -> Any:
    """ONNX's LSTM or GRU, for torch.onnx; its kernel leaves nothing."""
    states = hidden if kind == "lstm" else hidden[0]
    layer = aten_lstm if kind == "lstm" else aten_gru
    results = layer(input, states, weights, biases, 1, 0.0, True, len(weights) > (4 if biases else 2), False)
    return [*results, *[opset18.Constant(value=helper.make_tensor("left", TensorProto.UINT8, [0], []))] * 2]


TABLE: Decompositions = {LAYER: _layer, torch.ops.fxpipe.recurrent_layer_backward.default: _backward}
