"""Traces RNN, LSTM and GRU: each layer as one operator (`fxpipe.ir.recurrent_layer`), dropout between them outside.

Packed sequences, and layers without a kernel under autocast, are traced step by step with torch's decompositions, of
which this corrects what is wrong for training. All are defects of `torch._decomp.decompositions`; the first two do not
show when tracing for inference:

- `_rnn_helper` tests `num_layers < i - 1`, which is never true: the dropout between layers silently disappears
  (torch 2.11 to 2.15).
- `select_one_layer_lstm_function` looks only at the input: an LSTM that reads the data directly becomes
  `mkldnn_rnn_layer` in inference mode, which has no backward (torch 2.11 to 2.15).
- `one_layer_lstm` returns the last states with one dimension more than the first states (torch 2.11).

On CUDA a layer whose parameters are replaced, as here by stand-ins, moves them together in memory for cuDNN. That needs
addresses, which stand-ins do not have (torch 2.11); a trace does not need it.

When torch has fixed them, these replacements compute the same and can go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fxpipe.ir.recurrent_layer import KINDS, has_kernel, recurrent_layer, recurrent_layer_backward, used
from fxpipe.torch_private import RNN_HELPER, DispatchKey, decompositions, torch_decompositions
from fxpipe.tracing import kernels


@contextlib.contextmanager
def trainable() -> Iterator[None]:
    """Inside, recurrent layers are traced as in training."""
    operators = {kind: getattr(torch.ops.aten, kind).input for kind in KINDS}
    code = {o: _by_layers(kind, o.py_kernels[DispatchKey.Autograd]) for kind, o in operators.items()}
    corrected: dict[str, Any] = {
        RNN_HELPER: _layer_by_layer(getattr(decompositions, RNN_HELPER, None)),
        "select_one_layer_lstm_function": lambda *_: _one_layer_lstm,
    }
    with (
        mock.patch.multiple(nn.RNNBase, flatten_parameters=lambda layer: None),
        mock.patch.multiple(decompositions, create=True, **corrected),
        kernels.traced_by(code),
    ):
        yield


class Layer(torch.autograd.Function):
    """The operator of a layer, differentiated by its own backward."""

    @staticmethod
    def forward(ctx: Any, kind: str, biases: bool, states: int, input: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        hidden, weights = list(tensors[:states]), list(tensors[states:])
        results = recurrent_layer(kind, input, hidden, weights, biases)
        saved = results if has_kernel(kind, input, hidden) else []
        ctx.save_for_backward(input, *tensors, *saved)
        ctx.kind, ctx.biases, ctx.counts = kind, biases, (1, states, len(weights), len(saved))
        ctx.set_materialize_grads(False)
        return tuple(results[: 1 + states])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        values = iter(ctx.saved_tensors)
        (input,), hidden, weights, results = ([next(values) for _ in range(count)] for count in ctx.counts)
        if torch.is_grad_enabled():  # its gradients are differentiated again, which only the steps' can be
            outputs = by_steps(ctx.kind, input, hidden, weights, ctx.biases)
            of, known_gradients = used(outputs, gradients)
            leaves = [input, *hidden, *weights]
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            computed = iter(torch.autograd.grad(of, trained, known_gradients, create_graph=True, allow_unused=True))
            return None, None, None, *(next(computed) if leaf.requires_grad else None for leaf in leaves)
        layer_call = (ctx.kind, input, hidden, weights, ctx.biases)
        return None, None, None, *recurrent_layer_backward(list(gradients), results, *layer_call)


def by_steps(
    kind: str, input: Tensor, hidden: Sequence[Tensor], weights: Sequence[Tensor], biases: bool
) -> tuple[Tensor, ...]:
    """The output and the last states of one layer, in torch's operators for each step; inside `trainable`."""
    operator = getattr(torch.ops.aten, kind).input
    states = hidden if kind == "lstm" else hidden[0]
    results: tuple[Tensor, ...] = torch_decompositions[operator](
        input, states, weights, biases, 1, 0.0, True, len(hidden[0]) == 2, False
    )
    return results


def _by_layers(kind: str, stepwise: Callable[..., Any]) -> Callable[..., Any]:
    """What traces a module of this kind by layers; `stepwise` is torch's."""

    def traced(
        input: Tensor,
        first: Any,
        weights: Sequence[Tensor],
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        hidden = list(first) if kind == "lstm" else [first]
        device = input.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            if not has_kernel(kind, input, hidden, dtype):
                return stepwise(input, first, weights, biases, layers, dropout, train, bidirectional, batch_first)
            input, hidden, weights = input.to(dtype), [h.to(dtype) for h in hidden], [w.to(dtype) for w in weights]
        value = input.transpose(0, 1) if batch_first else input
        both, count = 2 if bidirectional else 1, len(weights) // layers
        last = []
        for layer in range(layers):
            states = hidden if layers == 1 else [h[layer * both : (layer + 1) * both] for h in hidden]
            layer_weights = weights[layer * count : (layer + 1) * count]
            value, *ended = Layer.apply(kind, biases, len(states), value, *states, *layer_weights)
            last.append(ended)
            if dropout and train and layer < layers - 1:
                value = torch.dropout(value, dropout, train=True)
        value = value.transpose(0, 1) if batch_first else value
        return value, *(of_state[0] if layers == 1 else torch.cat(of_state) for of_state in zip(*last, strict=True))

    return traced


def _one_layer_lstm(
    input: torch.Tensor, hidden: Sequence[torch.Tensor], *arguments: Any, **options: Any
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """torch's function, with last states of the shapes of the first ones."""
    value, last = decompositions.one_layer_lstm(input, hidden, *arguments, **options)
    pairs = zip(last, hidden, strict=True)
    return value, tuple(new if new.dim() == old.dim() else new.squeeze(0) for new, old in pairs)


def _layer_by_layer(helper: Any) -> Callable[..., Any]:
    """`helper`, called for one layer at a time, with the dropout between them."""

    def layers(
        input: torch.Tensor,
        hidden: Sequence[Any],
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer_fn: Callable[..., Any],
    ) -> tuple[torch.Tensor, list[Any]]:
        value = input.transpose(0, 1) if batch_first else input
        directions = 2 if bidirectional else 1
        finals: list[Any] = []
        for layer in range(num_layers):
            mine = slice(layer * directions, (layer + 1) * directions)
            value, final = helper(
                value, hidden[mine], params[mine], has_biases, 1, 0.0, train, bidirectional, False, layer_fn
            )
            finals += final
            if dropout and train and layer < num_layers - 1:
                value = torch.dropout(value, dropout, train=True)
        return (value.transpose(0, 1) if batch_first else value), finals

    return layers
