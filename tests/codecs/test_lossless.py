"""`bits` and `int32`: every bit comes back, and what does not fit is an error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_values import gaussian, to_and_fro

from fxpipe.codecs import codec
from fxpipe.errors import RunError


@given(values=st.lists(st.booleans(), max_size=70))
def test_truth_values(values: list[bool]) -> None:
    value = torch.tensor(values, dtype=torch.bool)
    packed = codec("bits").pack(value)
    assert packed.tolist() == [
        sum(v << i for i, v in enumerate(values[at : at + 8])) for at in range(0, len(values), 8)
    ]
    assert torch.equal(codec("bits").unpack(packed, value.shape, torch.bool), value)


def test_truth_values_anywhere_in_memory() -> None:
    for start in range(9):
        for count in (7, 8, 64, 65):
            value = (gaussian(100) > 0)[start : start + count]
            assert torch.equal(to_and_fro(codec("bits"), value), value)


@given(values=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_whole_numbers(values: list[int]) -> None:
    value = torch.tensor(values, dtype=torch.int64)
    assert torch.equal(to_and_fro(codec("int32"), value), value)


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 2**32, 2**62])
def test_whole_numbers_that_do_not_fit(wrong: int) -> None:
    value = torch.tensor([[3, wrong], [-5, 7]])
    with pytest.raises(RunError, match=f"{min(wrong, -5)} to {max(wrong, 7)}") as caught:
        codec("int32").pack(value)
    assert "none" in str(caught.value.hint)
