"""What autograd will call for a tensor's gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from fxpipe.torch_private import BackwardHookFunction, written_as
from fxpipe.tracing.recurrent import Layer


def nodes(tensor: torch.Tensor) -> Iterator[Any]:
    """All nodes of the graph behind a tensor, each once."""
    waiting: list[Any] = [tensor.grad_fn]
    seen = {None, *waiting}
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
        next_nodes = {function for function, _ in getattr(node, "next_functions", ())} - seen
        seen |= next_nodes
        waiting.extend(next_nodes)


def functions(tensor: torch.Tensor) -> list[str]:
    """The names of the user's autograd.Functions behind a tensor, such as `Written`."""
    kinds: dict[Any, None] = dict.fromkeys(type(node) for node in nodes(tensor) if isinstance(node, BackwardCFunction))
    ours = (BackwardHookFunction, Layer)
    return [written_as(kind).__qualname__ for kind in kinds if written_as(kind) not in ours]
