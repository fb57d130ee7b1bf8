"""A layer of nn.LSTM, nn.GRU or nn.RNN as one operator, forward and backward, with the kernels of eager PyTorch.

oneDNN trains an LSTM on a CPU, in float32 and bfloat16, and cuDNN trains all kinds on a GPU: their backward reads what
their forward leaves. For other layers torch has only the backwards of many small operators, so there the backward
computes the layer again.

Emitted stages that call it import this module.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from fxpipe.torch_private import autograd_in_kernel, disable_current_modes, has_bfloat16

aten = torch.ops.aten

KINDS = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""torch's functions of recurrent layers, and cuDNN's numbers of them; oneDNN has the same for an LSTM."""

_ARGUMENTS = "str kind, Tensor input, Tensor[] hidden, Tensor[] weights, bool biases"


class LayerCall(NamedTuple):
    """The arguments of the operators (see `recurrent_layer`)."""

    kind: str
    input: Tensor
    hidden: list[Tensor]
    weights: list[Tensor]
    biases: bool


@torch.library.custom_op("fxpipe::recurrent_layer", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]")
def recurrent_layer(
    kind: str, input: Tensor, hidden: list[Tensor], weights: list[Tensor], biases: bool
) -> list[Tensor]:
    """One layer, of one or two directions.

    Args:
        kind: of `KINDS`.
        input: [steps, samples, features].
        hidden: its first states, each [directions, samples, features]: two of an LSTM, else one.
        weights: of each direction in torch's order: of input and states, their `biases`, a projection.

    Returns:
        The output, [steps, samples, directions · features]; the last states, like `hidden`; and two tensors that its
        kernel leaves for the backward, empty if it leaves none.
    """
    results = _kernel(kind, input, hidden)[0](LayerCall(kind, input.contiguous(), hidden, weights, biases))
    results += [input.new_empty(0, dtype=torch.uint8) for _ in range(len(hidden) + 3 - len(results))]
    return [value.contiguous() for value in results]


@recurrent_layer.register_fake
def _(kind: str, input: Tensor, hidden: list[Tensor], weights: list[Tensor], biases: bool) -> list[Tensor]:
    steps, samples, _ = input.shape
    output = input.new_empty(steps, samples, len(hidden[0]) * hidden[0].shape[2])
    left = [input.new_empty(0, dtype=torch.uint8) for _ in range(2)]
    if has_kernel(kind, input, hidden):
        shapes = (tuple(input.shape), *(tuple(value.shape) for value in (*hidden, *weights)))
        specs = _left(kind, input.device, input.dtype, len(hidden), shapes, biases)
        left = [input.new_empty(shape, dtype=dtype) for shape, dtype in specs]
    return [output, *(state.new_empty(state.shape) for state in hidden), *left]


@functools.cache
def _left(
    kind: str, device: torch.device, dtype: torch.dtype, states: int, shapes: tuple[tuple[int, ...], ...], biases: bool
) -> list[tuple[torch.Size, torch.dtype]]:
    """The shapes and dtypes of what a kernel leaves for its backward, which only the kernel knows."""
    with disable_current_modes():
        input, *values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        results = recurrent_layer(kind, input, values[:states], values[states:], biases)
    return [(value.shape, value.dtype) for value in results[1 + states :]]


@torch.library.custom_op(
    "fxpipe::recurrent_layer_backward",
    mutates_args=(),
    schema=f"(Tensor?[] gradients, Tensor[] results, {_ARGUMENTS}) -> Tensor[]",
)
def recurrent_layer_backward(
    gradients: list[Tensor | None],
    results: list[Tensor],
    kind: str,
    input: Tensor,
    hidden: list[Tensor],
    weights: list[Tensor],
    biases: bool,
) -> list[Tensor]:
    """The gradients of `input`, `hidden` and `weights`, in this order.

    Args:
        gradients: of the output and the last states; None for zeros.
        results: of the forward.
    """
    computed = _kernel(kind, input, hidden)[1](
        LayerCall(kind, input.contiguous(), hidden, weights, biases), gradients, results
    )
    return [value.contiguous() for value in computed]


@recurrent_layer_backward.register_fake
def _(gradients: list[Tensor | None], results: list[Tensor], *layer: Any) -> list[Tensor]:
    _, input, hidden, weights, _ = layer
    return [value.new_empty(value.shape) for value in (input, *hidden, *weights)]


def has_kernel(kind: str, input: Tensor, hidden: Sequence[Tensor], dtype: torch.dtype | None = None) -> bool:
    """Whether torch has a kernel that trains such a layer; eager PyTorch then uses it.

    Args:
        dtype: of the computation, if it is not the input's.
    """
    return _kernel(kind, input, hidden, dtype) is not _STEPS


def _kernel(
    kind: str, input: Tensor, hidden: Sequence[Tensor], dtype: torch.dtype | None = None
) -> tuple[Callable[..., list[Tensor]], Callable[..., list[Tensor]]]:
    """A forward and a backward."""
    dtype = dtype or input.dtype
    if input.device.type == "cuda":
        return _CUDNN if torch.backends.cudnn.enabled and dtype != torch.float64 else _STEPS
    fits = dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16())
    enabled = input.device.type == "cpu" and torch.backends.mkldnn.enabled
    projects = kind == "lstm" and hidden[0].shape[2] != hidden[1].shape[2]
    return _ONEDNN if enabled and kind == "lstm" and fits and not projects else _STEPS


def _onednn(layer: LayerCall) -> list[Tensor]:
    kind, input, hidden, weights, biases = layer
    directions = []
    with torch.enable_grad():  # else the kernel leaves nothing
        for arguments, reverse in _directions(hidden, weights, biases):
            directions.append(
                aten.mkldnn_rnn_layer(
                    input, *arguments, reverse, [], KINDS[kind], arguments[-1].shape[2], 1, biases, False, False, True
                )
            )
    if len(directions) == 1:
        return list(directions[0])
    output, state, cell, left = zip(*directions, strict=True)
    return [torch.cat(output, -1), torch.cat(state), torch.cat(cell), *left]


def _onednn_backward(layer: LayerCall, gradients: list[Tensor | None], results: list[Tensor]) -> list[Tensor]:
    kind, input, hidden, weights, biases = layer
    both = len(hidden[0])
    parts = [
        [None] * both if value is None else [part.contiguous() for part in value.chunk(both, 0 if place % 3 else -1)]
        for place, value in enumerate((*results[:3], *gradients))
    ]
    directions = []
    for at, (arguments, reverse) in enumerate(_directions(hidden, weights, biases)):
        values = [part[at] for part in parts]
        sizes = (KINDS[kind], arguments[-1].shape[2], 1)
        computed = aten.mkldnn_rnn_layer_backward(
            input, *arguments, *values, reverse, *sizes, biases, True, False, [], False, results[3 + at]
        )
        computed = [value.to(input.dtype) for value in computed]  # as autograd does: the kernel's are float32
        directions.append((computed[0], computed[5], computed[6], computed[1 : 1 + len(weights) // both]))
    inputs, states, cells, own_weights = zip(*directions, strict=True)
    return [functools.reduce(torch.add, inputs), torch.cat(states), torch.cat(cells), *itertools.chain(*own_weights)]


def _directions(hidden: list[Tensor], weights: list[Tensor], biases: bool) -> Iterator[tuple[tuple[Tensor, ...], bool]]:
    """What oneDNN's kernel takes for each direction: weights, biases and first states; and whether it is reversed."""
    state, cell = hidden
    count = len(weights) // len(state)
    for at in range(len(state)):
        direction = weights[at * count : (at + 1) * count]
        none = [] if biases else [direction[0].new_zeros(len(direction[0]))] * 2
        yield (*direction, *none, state[at : at + 1].contiguous(), cell[at : at + 1].contiguous()), at == 1


def _cudnn(layer: LayerCall) -> list[Tensor]:
    results = aten._cudnn_rnn(layer.input, *_of_cudnn(layer, None))
    return [value for place, value in enumerate(results) if place != 2 or layer.kind == "lstm"]


def _cudnn_backward(layer: LayerCall, gradients: list[Tensor | None], results: list[Tensor]) -> list[Tensor]:
    of_output, of_state, of_cell = (*gradients, None)[:3]
    reserve, buffer = results[-2:]
    arguments = _of_cudnn(layer, buffer)
    states = [None if value is None else value.contiguous() for value in (of_output, of_state, of_cell)]
    of_input, of_state, of_cell, of_weights = aten._cudnn_rnn_backward(
        layer.input, *arguments[:5], results[0], *states, *arguments[5:], reserve, [True] * 4
    )
    weight_gradients = [value.clone() for value in of_weights]  # parts of one buffer
    return [of_input, *(of_state, of_cell)[: len(layer.hidden)], *weight_gradients]


def _of_cudnn(layer: LayerCall, buffer: Tensor | None) -> list[Any]:
    """The arguments of cuDNN's kernels after the input."""
    state, *cell = [value.contiguous() for value in layer.hidden]
    both, size = len(state), layer.hidden[-1].shape[2]
    projected = 0 if state.shape[2] == size else state.shape[2]
    first = [layer.weights, len(layer.weights) // both, buffer, state, cell[0] if cell else None]
    return [*first, KINDS[layer.kind], size, projected, 1, False, 0.0, True, both == 2, [], None]


def _steps(layer: LayerCall) -> list[Tensor]:
    kind, input, hidden, weights, biases = layer
    states = hidden if kind == "lstm" else hidden[0]
    return list(getattr(torch, kind)(input, states, weights, biases, 1, 0.0, True, len(hidden[0]) == 2, False))


def _steps_backward(layer: LayerCall, gradients: list[Tensor | None], results: list[Tensor]) -> list[Tensor]:
    with autograd_in_kernel():
        return list(differentiated(_steps, layer, gradients))


def differentiated(
    steps: Callable[[LayerCall], Sequence[Tensor]], layer: LayerCall, gradients: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The gradients of a layer's input, first states and weights, by autograd through what `steps` computes of it."""
    leaves = [value.detach().requires_grad_() for value in (layer.input, *layer.hidden, *layer.weights)]
    detached = layer._replace(
        input=leaves[0], hidden=leaves[1 : 1 + len(layer.hidden)], weights=leaves[1 + len(layer.hidden) :]
    )
    with torch.enable_grad():
        values, known_gradients = used(steps(detached), gradients)
        return torch.autograd.grad(values, leaves, known_gradients, materialize_grads=True)


def used(results: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The results that have a gradient, and these."""
    pairs = [(value, gradient) for value, gradient in zip(results, gradients, strict=True) if gradient is not None]
    return [value for value, _ in pairs], [gradient for _, gradient in pairs]


_ONEDNN, _CUDNN, _STEPS = (_onednn, _onednn_backward), (_cudnn, _cudnn_backward), (_steps, _steps_backward)


def is_left(node: fx.Node) -> bool:
    """Whether a node is one of the two tensors that only the kernel of its layer can make and read."""
    if node.target is not operator.getitem:
        return False
    call, place = cast("tuple[fx.Node, int]", node.args)
    return call.target is torch.ops.fxpipe.recurrent_layer.default and place > len(cast("list[Any]", call.args[2]))
