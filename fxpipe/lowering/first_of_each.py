"""The shapes of batches in some data: each gets stages of its own, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fxpipe.task.batch import describe, dump, shape_key

SHAPES = 8
"""How many shapes of batches are cut into stages, each on its own."""


def first_of_each(batches: Iterable[Any], constant_batch: Sequence[str] = ()) -> Iterator[Any]:
    """The first batch of every shape, as it comes.

    Raises:
        BatchError: a batch is no pytree of tensors.
    """
    seen = set()
    for batch in batches:
        leaves, _, spec = describe(batch, constant_batch)
        key = shape_key(dump(spec), leaves)
        if key not in seen:
            seen.add(key)
            yield batch
