"""The first batches of some data, and what the data say of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from fxpipe.task.batch import Batch, Dims


@dataclass(frozen=True)
class FirstBatches:
    """The first batches of `train_data()`.

    Attributes:
        batches: at least one.
        length: how many an epoch has, where the data say so.
        size: the samples of a batch, where a DataLoader says so.
        last: those of its last batch, where that is smaller.
    """

    batches: list[Any]
    length: int | None = None
    size: int | None = None
    last: int | None = None

    def apart(self) -> tuple[list[Any], Any]:
        """The batches after the first, and, apart from them, the smaller last one of an epoch, if it is among them."""
        if self.last is None or len(self.batches) != self.length:
            return self.batches[1:], None
        return self.batches[1:-1], self.batches[-1]


def first_batches(data: Iterable[Any], count: int) -> FirstBatches:
    """At most so many, read in one go; the first is a copy where more are read, which may be made in its memory."""
    try:
        length: int | None = len(data)  # type: ignore[arg-type]
    except TypeError:
        length = None
    batches: list[Any] = []
    for batch in itertools.islice(data, count):
        batches.append(batch if batches or count == 1 else Batch.of(batch).each(torch.clone).given)
    return FirstBatches(batches, length, *_sizes(data))


def _sizes(data: Iterable[Any]) -> tuple[int | None, int | None]:
    """The samples of a DataLoader's batches, and what is left over for the last, if its own sampler makes them."""
    sampler = data.batch_sampler if isinstance(data, DataLoader) else None
    plain = type(sampler).__name__ == "BatchSampler"  # torch's, or torchdata's
    if not isinstance(sampler, BatchSampler) or not plain or sampler.drop_last:
        return None, None
    try:
        samples = len(sampler.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None, None
    left = samples % sampler.batch_size
    return sampler.batch_size, left if left and samples > sampler.batch_size else None


def shortened(batch: Batch, first: FirstBatches, dims: Dims) -> Batch | None:
    """As many samples of a batch, along these dimensions, as the last one of an epoch will have; None if they are not
    seen in its tensors."""
    rows = [(value, dims[name]) for name, value in zip(batch.names, batch.values, strict=True)]
    if first.last is None or {value.shape[dim] for value, dim in rows if dim is not None} != {first.size}:
        return None
    return batch.of_values(v if dim is None else v.narrow(dim, 0, first.last) for v, dim in rows)
