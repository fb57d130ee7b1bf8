"""The shapes of batches in some data: each gets stages of its own, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from fxpipe.errors import BatchError
from fxpipe.plan.spec import PadSpec
from fxpipe.task.batch import Batch

SHAPES = 8
"""How many shapes of batches are cut into stages, each on its own."""


def first_of_each(batches: Iterable[Batch], padding: Sequence[PadSpec] = ()) -> Iterator[Batch]:
    """The first batch of every shape, as it comes.

    Args:
        padding: counts the shapes after it, and of each tells batches that it changes from those that it leaves alone.

    Raises:
        BatchError: a batch is no pytree of tensors.
    """
    seen = set()
    for batch in batches:
        after = batch.padded(padding)
        key = after.shape, after is batch
        if key not in seen:
            seen.add(key)
            yield batch


def one_of_each(batches: Iterable[Batch], data: str, hint: str) -> list[Batch]:
    """The first batch of every shape.

    Args:
        data: what gives the batches, and `hint` what to do about too many shapes, in words.

    Raises:
        BatchError: there are too many shapes, or a batch is no pytree of tensors.
    """
    found = list(islice(first_of_each(batches), SHAPES + 1))
    if len(found) > SHAPES:
        raise BatchError(f"{data} batches of more than {SHAPES} shapes", hint=hint, page="batch-shapes")
    return found
