"""Every operator that draws random numbers gives the same ones, so that two ways of playing can be compared."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.random_state import seed_torch


class TooLong(BaseException):
    """A loop that does not end, as it seems: the optimizer's except clauses let it pass."""


class EqualDraws(TorchDispatchMode):
    """Every operator that draws random numbers gives the same ones for the same shape, in whatever order it is called.

    Args:
        device: what draws them, if not the CPU.
        most: operators before `TooLong`.

    Attributes:
        operators: how many were called.
        eps: of the coarsest dtype that was computed in, counts and rates apart.
        drawer: the optimizer whose step it is.
        drawers: the optimizers that drew from a torch.Generator of the user's, for each of these.
    """

    def __init__(self, device: str, most: float = math.inf) -> None:
        super().__init__()
        self.operators = 0
        self.eps = 0.0
        self.drawer: torch.optim.Optimizer | None = None
        self.drawers: dict[torch.Generator, set[Any]] = {}
        self._device = device
        self._most = most

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled meanwhile: torch need not keep its compiler from every call, which takes long."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        if self.operators > self._most:
            raise TooLong
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            seed_torch(0, self._device)
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Generator):
                    value.manual_seed(0)
                    self.drawers.setdefault(value, set()).add(self.drawer)
        result = func(*args, **kwargs)
        for tensor in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point and tensor.numel() > 1:
                self.eps = max(self.eps, _eps(tensor.dtype))
        return result


@functools.cache
def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
