"""Whose values a tensor is made of: a set of workers for every storage, for every element where elements differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Workers = int
"""A set of workers: a bit for each."""

UNSURE: Workers = 1 << 62
"""In a set that may be too large: of an operator that mixed several workers' values it is not known how."""

MOST_WORKERS = 60
"""Bits there are; workers beyond share them."""


def several(workers: Workers) -> bool:
    """Whether these are more than one."""
    known = workers & ~UNSURE
    return known & (known - 1) != 0


@dataclass
class _WhoseStorage:
    """Of a storage.

    Attributes:
        reference: keeps the storage's address from being used again, though not its memory.
        workers: of all elements together.
        elements: of each element, flat, int64; None where all have the same.
        at: where the values of several workers came together.
    """

    reference: StorageWeakRef
    workers: Workers
    elements: Tensor | None = None
    at: str = ""


class Whose:
    """The workers whose values every tensor is made of; what is not written down is made of none."""

    def __init__(self) -> None:
        self._made: dict[int, _WhoseStorage] = {}

    def of(self, tensor: Tensor) -> Workers:
        """Of all elements together."""
        made = self._made.get(tensor.untyped_storage()._cdata)
        if made is None:
            return 0
        if made.elements is None:
            return made.workers
        return union(self.elements(tensor))

    def elements(self, tensor: Tensor) -> Tensor:
        """Of each element: int64, of the tensor's shape."""
        made = self._made.get(tensor.untyped_storage()._cdata)
        if made is None or made.elements is None:
            return _full(tensor, made.workers if made else 0)
        if made.elements.numel() != _capacity(tensor):  # it is seen in another dtype
            return _full(tensor, made.workers)
        return made.elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def at(self, tensors: Iterable[Tensor]) -> str:
        """Where values of several workers came together in one of these; "" where they did not."""
        for tensor in tensors:
            made = self._made.get(tensor.untyped_storage()._cdata)
            if made is not None and made.at:
                return made.at
        return ""

    def put(self, tensor: Tensor, workers: Workers, at: str = "") -> None:
        """The tensor's elements are made of these workers' values, from now on."""
        storage = tensor.untyped_storage()
        made = self._made.get(storage._cdata)
        if made is None:
            if workers:
                self._made[storage._cdata] = _WhoseStorage(StorageWeakRef(storage), workers, at=at)
            return
        if at and not made.at:
            made.at = at
        if made.elements is None and made.workers == workers:
            return
        if tensor.numel() == _capacity(tensor):
            made.workers, made.elements, made.at = workers, None, at
        else:
            self.put_elements(tensor, _full(tensor, workers), at)

    def put_elements(self, tensor: Tensor, workers: Tensor, at: str = "") -> None:
        """The same, each element of its own."""
        if not workers.numel():
            return
        if bool((workers == workers.flatten()[0]).all()) and tensor.numel() == _capacity(tensor):
            self.put(tensor, int(workers.flatten()[0]), at)
            return
        storage, capacity = tensor.untyped_storage(), _capacity(tensor)
        if storage._cdata not in self._made:
            self._made[storage._cdata] = _WhoseStorage(StorageWeakRef(storage), 0)
        made = self._made[storage._cdata]
        if made.elements is None or made.elements.numel() != capacity:
            made.elements = torch.full((capacity,), made.workers, dtype=torch.int64, device=tensor.device)
        made.elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(workers)
        made.workers = union(made.elements)
        made.at = made.at or at

    def forget_the_dead(self) -> None:
        """Drop what is known of storages that are no more."""
        self._made = {key: made for key, made in self._made.items() if not made.reference.expired()}

    def kept(self) -> list[str]:
        """Where values of several workers came together in an element that is still there."""
        self.forget_the_dead()
        found = []
        for made in self._made.values():
            each = [made.workers] if made.elements is None else made.elements.unique().tolist()
            if any(several(workers) and not workers & UNSURE for workers in each):
                found.append(made.at)
        return found


def union(workers: Tensor) -> Workers:
    """All of a tensor's sets together."""
    found = 0
    for each in set(workers.flatten().tolist()):
        found |= each
    return found


def _capacity(tensor: Tensor) -> int:
    """How many elements of its dtype the tensor's storage has."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _full(tensor: Tensor, workers: Workers) -> Tensor:
    return torch.full(tensor.shape, workers, dtype=torch.int64, device=tensor.device)
