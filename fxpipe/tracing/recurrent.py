"""Corrects what torch's tracing decompositions of RNN, LSTM and GRU get wrong for training.

All are defects of `torch._decomp.decompositions`; the first two do not show when tracing for inference:

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

import torch
from torch import nn

from fxpipe.torch_private import RNN_HELPER, decompositions


@contextlib.contextmanager
def trainable() -> Iterator[None]:
    """Inside, recurrent layers are traced as in training."""
    helper: Any = getattr(decompositions, RNN_HELPER, None)
    select: Any = getattr(decompositions, "select_one_layer_lstm_function", None)
    layers: Any = nn.RNNBase
    lay_out = layers.flatten_parameters
    layers.flatten_parameters = lambda layer: None
    if helper is not None:
        setattr(decompositions, RNN_HELPER, _layer_by_layer(helper))
    if select is not None:
        decompositions.select_one_layer_lstm_function = lambda *_: _one_layer_lstm
    try:
        yield
    finally:
        layers.flatten_parameters = lay_out
        if helper is not None:
            setattr(decompositions, RNN_HELPER, helper)
        if select is not None:
            decompositions.select_one_layer_lstm_function = select


def _one_layer_lstm(
    input: torch.Tensor, hidden: Sequence[torch.Tensor], *rest: Any, **options: Any
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """torch's function, with last states of the shapes of the first ones."""
    value, last = decompositions.one_layer_lstm(input, hidden, *rest, **options)
    pairs = zip(last, hidden, strict=True)
    return value, tuple(new if new.dim() == old.dim() else new.squeeze(0) for new, old in pairs)


def _layer_by_layer(helper: Callable[..., Any]) -> Callable[..., Any]:
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
