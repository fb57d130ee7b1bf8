"""Traces an operator that has a kernel and a gradient formula as itself, not as a decomposition that torch prefers.

torch's Python dispatcher, under which a joint graph is traced, has Python code in place of the autograd of some
operators, and that code does not always compute what the kernel does (torch 2.13):

- `multilabel_margin_loss_forward` sums over all labels, also after the first −1;
- `multi_margin_loss` passes a gradient where an entry is exactly at the margin, and keeps a NaN that the kernel drops;
- resizing (`upsample_…`) gathers and scatters by index, which rounds differently, in bf16 by percents.

Eager PyTorch runs the kernels, so a captured step does too. When torch has fixed its decompositions, this only keeps
graphs short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxpipe.torch_private import DispatchKey, OpOverload, OpOverloadPacket, dispatch_cache

aten = torch.ops.aten

_DECOMPOSED = {
    # Their kernels change running statistics, which their schemas do not say.
    aten.native_batch_norm,
    aten.cudnn_batch_norm,
    aten.miopen_batch_norm,
    # Composed of other operators in any case; `recurrent` corrects torch's code.
    aten.lstm,
    aten.gru,
    aten.rnn_tanh,
    aten.rnn_relu,
    # One operator that draws, whose backward reads the mask.
    aten.dropout,
}

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def replaced() -> list[OpOverload]:
    """The operators that torch would trace as Python code although they have a kernel, or C++ code that calls one.

    Registrations make packets and overloads attributes of their namespaces: no other needs to be looked up.
    """
    packets = [p for p in vars(aten).values() if isinstance(p, OpOverloadPacket) and p not in _DECOMPOSED]
    overloads = [o for p in packets for o in vars(p).values() if isinstance(o, OpOverload)]
    return [o for o in overloads if DispatchKey.Autograd in o.py_kernels]


def traced() -> AbstractContextManager[None]:
    """Inside, operators with kernels of their own are traced as these."""
    return traced_by(dict.fromkeys(replaced()))


@contextlib.contextmanager
def traced_by(code: Mapping[OpOverload, Callable[..., Any] | None]) -> Iterator[None]:
    """Inside, each of these operators is traced by this Python code in place of torch's; as itself for None."""
    before = {operator: dict(operator.py_kernels) for operator in code}
    for operator, function in code.items():
        for key in _KEYS:
            operator.py_kernels.pop(key, None)
        if function is not None:
            operator.py_kernels.update(dict.fromkeys(_KEYS, function))
        dispatch_cache(operator).clear()
    try:
        yield
    finally:
        for operator, kernels in before.items():
            operator.py_kernels.update(kernels)
            dispatch_cache(operator).clear()
