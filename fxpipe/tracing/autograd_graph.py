"""What autograd will call for a tensor's gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction


def nodes(tensor: torch.Tensor) -> Iterator[Any]:
    """All nodes of the graph behind a tensor, each once."""
    waiting: list[Any] = [tensor.grad_fn]
    seen = {None, *waiting}
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
        found = {function for function, _ in getattr(node, "next_functions", ())} - seen
        seen |= found
        waiting.extend(found)


def has_functions(tensor: torch.Tensor) -> bool:
    """Whether there are functions written in Python among them, as those of full backward hooks are."""
    return any(isinstance(node, BackwardCFunction) for node in nodes(tensor))
