"""Batch norm that normalises each microbatch by itself, so that a whole batch and its microbatches can be compared."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fxpipe.torch_private import schema_of


class SeparateBatchNorm(TorchFunctionMode):
    """Inside, a batch norm in training splits a batch and normalises one microbatch after the other.

    Everything else sees the whole batch: so eager PyTorch's loss is the whole batch's with batch norms as in a
    pipeline. It works in backward, too, where regions of `torch.utils.checkpoint` are computed again.

    Args:
        microbatches: how many a batch has, along dimension 0 of what is normalised.
    """

    def __init__(self, microbatches: int) -> None:
        super().__init__()
        self.microbatches = microbatches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            with self._patched():
                return func(*args, **kwargs)
        if func not in _NAMES:
            return func(*args, **kwargs)
        given = dict(zip(_NAMES[func], args, strict=False)) | kwargs
        batch = given.pop("input")
        if not given.get("training", False) or batch.shape[0] % self.microbatches:
            return func(*args, **kwargs)
        return torch.cat([func(part, **given) for part in batch.chunk(self.microbatches)])

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """What the mode does, without the mode: torch removes it while a method such as `backward` runs."""
        original = torch.batch_norm
        torch.batch_norm = lambda *args, **kwargs: self.__torch_function__(original, (), args, kwargs)
        try:
            yield
        finally:
            torch.batch_norm = original


_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)

_NAMES = {
    F.batch_norm: tuple(inspect.signature(F.batch_norm).parameters),
    torch.batch_norm: tuple(a.name for a in schema_of(torch.ops.aten.batch_norm.default).arguments),
}
