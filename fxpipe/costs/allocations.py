"""Tracked allocations: the bytes of the tensors' memory that exists while calls run, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.task.wrapped_tensors import plain_tensors
from fxpipe.torch_private import TorchDispatchMode, memory_of, pytree


class TrackedAllocations(TorchDispatchMode):
    """Counts the memory of every tensor that an operator reads or makes in this thread, from then until it is freed.

        with TrackedAllocations() as memory:
            train()
        most = memory.peak

    Views share the memory of their base, which counts once. Memory that an operator uses only internally is not seen,
    nor memory that no operator touches.

    Attributes:
        live: bytes that are held now.
        peak: the most that was held at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}  # bytes by address of the storage's record

    def restart(self) -> None:
        """From now on `peak` counts from the present memory."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and see what it read and made."""
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            self._see(tensor)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = memory_of(tensor)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested dictionaries, lists and tuples; of those that wrap others, these."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [plain for tensor in tensors for _, plain in plain_tensors("", tensor)]
