"""The first batches of some data, and what the data say about all of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from fxpipe.task.batch import Batch, Dims


@dataclass(frozen=True)
class FirstBatches:
    """The first batches of `train_data()`."""

    batches: list[Any]  # at least one
    length: int | None = None  # how many an epoch has, if the data say so
    size: int | None = None  # the samples of a batch, if the data say so (`batch_sizes`)
    last: int | None = None  # the samples of an epoch's last batch, if it is smaller


def first_batches(data: Iterable[Any], count: int) -> FirstBatches:
    """At most `count` batches, read in one go; the first is a copy if more are read, which may reuse its memory."""
    try:
        length: int | None = len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        length = None
    batches: list[Any] = []
    for batch in itertools.islice(data, count):
        batches.append(batch if batches or count == 1 else Batch.of(batch).each(torch.clone).given)
    return FirstBatches(batches, length, *batch_sizes(data))


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Inside, batches may be read; afterwards the model's tensors that are not trained have their values from before.

    Data may change them: a run reads the same batches, and would change them again.
    """
    held = (value for module in model.modules() for value in (*module.buffers(recurse=False), *vars(module).values()))
    with values_kept(value for value in held if isinstance(value, Tensor)):
        yield


@contextlib.contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Afterwards, those of these tensors that are not trained have their values from before."""
    before = [(t, t.detach().clone()) for t in tensors if not (t.requires_grad or t.is_meta)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                if not tensor.equal(value):
                    tensor.copy_(value)


def batch_sizes(data: Any) -> tuple[int | None, int | None]:
    """The samples of the data's batches, and of an epoch's last one if it has fewer; None: not known.

    A DataLoader says so if torch's own sampler makes its batches. Other data, or a sampler, can have a method
    `batch_sizes()` that returns these two.
    """
    sampler: Any = data.batch_sampler if isinstance(data, DataLoader) else None
    for source in (data, sampler):
        if hasattr(source, "batch_sizes"):
            sizes: tuple[int | None, int | None] = source.batch_sizes()
            return sizes
    plain = plain_sampler(data)
    return (None, None) if plain is None else joined_sizes(plain)


def plain_sampler(data: Any) -> BatchSampler | None:
    """The sampler that makes the batches of a DataLoader, if it is torch's own."""
    sampler = data.batch_sampler if isinstance(data, DataLoader) else None
    plain = type(sampler).__name__ == "BatchSampler"  # torch's, or torchdata's
    return sampler if isinstance(sampler, BatchSampler) and plain else None


def at_most(length: int, most: int | float | None) -> int:
    """How many of `length` batches an epoch has: at most a number of them, or a share."""
    return length if most is None else int(most * length) if isinstance(most, float) else min(most, length)


def joined_sizes(
    sampler: BatchSampler, joined: int = 1, most: int | float | None = None
) -> tuple[int | None, int | None]:
    """As `batch_sizes`, if several of a sampler's batches make one; the last of an epoch may have fewer. An epoch has
    at most so many of them, or such a share (`at_most`)."""
    try:
        samples, batches = len(sampler.sampler), at_most(len(sampler), most)  # type: ignore[arg-type]
    except TypeError:
        return None, None
    size = joined * sampler.batch_size
    before = (max(batches, 1) - 1) // joined * size
    last = min(samples, batches * sampler.batch_size) - before
    return size, last if before and last < size else None


def shortened(batch: Batch, first: FirstBatches, dims: Dims) -> Batch | None:
    """A batch shortened along these dimensions to the samples of an epoch's last one; None if its tensors do not show
    them."""
    rows = [(value, dims[name]) for name, value in zip(batch.names, batch.values, strict=True)]
    if first.last is None or {value.shape[dim] for value, dim in rows if dim is not None} != {first.size}:
        return None
    return batch.of_values(v if dim is None else v.narrow(dim, 0, first.last) for v, dim in rows)


def generator_of(data: Any) -> torch.Generator | None:
    """The generator of its own that a loader or a sampler, of torch or torchdata, draws from."""
    generator = getattr(data, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None
