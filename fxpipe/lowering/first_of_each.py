"""The shapes of batches in some data: each gets stages of its own, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fxpipe.errors import BatchError
from fxpipe.ir.program import Program
from fxpipe.plan.spec import PadSpec
from fxpipe.task.batch import Batch, Dims
from fxpipe.task.first_batches import FirstBatches, shortened
from fxpipe.task.splitter import Splitter

SHAPES = 8
"""How many shapes of batches are cut into stages, each on its own."""


def first_of_each(batches: Iterable[Batch], padding: Sequence[PadSpec] = (), values: int = SHAPES) -> Iterator[Batch]:
    """The first batch of every shape, unpadded; and more of that shape, with other numbers or strings.

    Args:
        padding: counts shapes after padding, and separately for batches that it changes and that it leaves alone.
        values: how many more.

    Raises:
        BatchError: a batch is not a pytree of tensors.
    """
    seen: dict[tuple[Any, ...], set[str]] = {}
    for batch in batches:
        after = batch.padded(padding)
        known, plain = seen.setdefault((after.shape, after is batch), set()), after.plain_values
        if plain not in known and len(known) <= values:
            known.add(plain)
            yield batch


def last_of_epoch(
    first: FirstBatches, found: Batch | None, known: Sequence[Batch], padding: Sequence[PadSpec], dims: Dims
) -> Batch | None:
    """A batch as small as the last one of an epoch; None if that has a known shape, or cannot be made from the others.

    Args:
        found: the last one itself, if it was read.
        known: a batch of every known shape, padded.
        dims: where the first of them is cut.
    """
    last = shortened(known[0], first, dims) if found is None else found
    if last is None:
        return None
    return last if len(list(first_of_each([*known, last.padded(padding)]))) > len(known) else None


def check_number(batches: Sequence[Any], data: str, hint: str) -> None:
    """Refuse batches of too many shapes.

    Args:
        batches: one of each shape, or what was captured of each.
        data: what gives the batches, in words; `hint` what to do about too many shapes.

    Raises:
        BatchError: there are too many.
    """
    if len(batches) > SHAPES:
        raise BatchError(f"{data} batches of more than {SHAPES} shapes", hint=hint, page="batch-shapes")


def fits(program: Program, batch: Batch, microbatches: int = 1) -> bool:
    """Whether a program computes the step of a batch: batch and program differ in nothing that the step reads.

    Args:
        microbatches: how many a batch is cut into; the program is captured on one.
    """
    given = [b.leaf for b in program.batch if b.leaf.name.startswith("batch")]
    return Splitter(given, program.batch_spec, microbatches).fits(batch)
