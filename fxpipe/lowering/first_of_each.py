"""The shapes of batches in some data: each gets stages of its own, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fxpipe.errors import BatchError
from fxpipe.ir.program import Program
from fxpipe.lowering.options import CompileOptions
from fxpipe.plan.spec import PadSpec
from fxpipe.task.batch import Batch
from fxpipe.task.first_batches import FirstBatches, shortened
from fxpipe.task.splitter import Splitter

SHAPES = 8
"""How many shapes of batches are cut into stages, each on its own."""


def first_of_each(batches: Iterable[Batch], padding: Sequence[PadSpec] = (), values: int = SHAPES) -> Iterator[Batch]:
    """The first batch of every shape, unpadded; and more of that shape, with other numbers or strings.

    Shapes count after padding, and separately for batches that it changes and that it leaves alone.

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


def batches_to_compile(
    read: FirstBatches, options: CompileOptions, device: str | None = None
) -> tuple[list[Batch], Batch | None]:
    """The first batch and the first of each other shape, unpadded; and a batch as small as the last one of an epoch.

    The latter is None if it has a shape of the others, or cannot be made from them where it was not read itself. All
    but the first batch are moved to the device.
    """
    batches = [Batch.of(batch, options.constant_batch) for batch in read.batches]
    padding = options.padding(batches)
    whole, last = batches, None
    if read.last is not None and len(batches) == read.length:
        *whole, last = batches
    known = list(first_of_each([batches[0], *whole[1:]], padding))
    if device is not None:  # only what is compiled or compared, not all that was read
        known[1:] = [batch.on(device) for batch in known[1:]]
        last = last and last.on(device)
    padded = [batch.padded(padding) for batch in known]
    last = last or shortened(padded[0], read, options.cut(padded[0]).dims)
    if last is not None and len(list(first_of_each([*padded, last.padded(padding)]))) == len(known):
        last = None
    return known, last


def open_end(read: FirstBatches, shapes: int, options: CompileOptions) -> tuple[str, ...]:
    """A warning if nothing says how an epoch ends, and all batches so far have one shape: the last may be smaller."""
    if read.length is not None or len(read.batches) < options.scan or shapes > 1 or options.scan < 2:
        return ()
    return (
        f"train_data() does not say how long it is, and its first {options.scan} batches have one shape: a run ends "
        "with an error where an epoch's last batch is smaller. If it may be, leave it out (drop_last=True), pad it, "
        "read as far (--scan N; in Python scan=), or let the run make stages for it (--new-shapes 1; in "
        "Python new_shapes=)",
    )


def check_number(batches: Sequence[Any], data: str, hint: str) -> None:
    """Refuse batches of too many shapes: of one batch for each, or what was captured of it.

    `data` says in words what gives the batches, `hint` what to do about too many shapes.
    """
    if len(batches) > SHAPES:
        raise BatchError(f"{data} batches of more than {SHAPES} shapes", hint=hint, page="batch-shapes")


def fits(program: Program, batch: Batch, microbatches: int = 1) -> bool:
    """Whether a program computes the step of a batch: batch and program differ in nothing that the step reads."""
    given = [b.leaf for b in program.batch if b.leaf.name.startswith("batch")]
    return Splitter(given, program.batch_spec, microbatches).fits(batch)
