"""What compile says of data whose end it does not know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fxpipe.lowering.first_of_each import open_end
from fxpipe.lowering.options import CompileOptions
from fxpipe.task.first_batches import first_batches

OPTIONS = CompileOptions(scan=4)


def stream(count: int) -> Iterator[Tensor]:
    yield from torch.ones(count, 2)


def test_a_stream_without_an_end_in_sight_may_have_a_smaller_last_batch() -> None:
    (warning,) = open_end(first_batches(stream(9), OPTIONS.scan), 1, OPTIONS)
    assert all(cure in warning for cure in ("drop_last=True", "--scan", "--new-shapes", "pad"))


class Unsized:
    """As data sets of libraries that know no length."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Tensor]:
        return stream(9)


def test_data_that_refuse_to_give_a_length_are_a_stream() -> None:
    assert open_end(first_batches(Unsized(), OPTIONS.scan), 1, OPTIONS)


@pytest.mark.parametrize(("count", "shapes"), [(3, 1), (9, 2)])
def test_nothing_is_said_where_all_or_several_shapes_were_read(count: int, shapes: int) -> None:
    assert open_end(first_batches(stream(count), OPTIONS.scan), shapes, OPTIONS) == ()


def test_nothing_is_said_of_data_with_a_length() -> None:
    assert open_end(first_batches(list(stream(9)), OPTIONS.scan), 1, OPTIONS) == ()
