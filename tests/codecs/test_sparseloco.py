"""`sparseloco` against its formula: what it sends of each chunk, in how many bits, and what comes later."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_values import gaussian, heavy_tailed, spec_of, state_at, to_and_fro
from torch import Tensor

from fxpipe.codecs import codec
from fxpipe.codecs.sparseloco import SparseLoCo
from fxpipe.errors import CodecError


def naive(chunk: Tensor, count: int) -> Tensor:
    """What arrives of one chunk, in float64."""
    found = torch.zeros_like(chunk, dtype=torch.float64)
    places = sorted(range(len(chunk)), key=lambda i: -abs(float(chunk[i])))[:count]
    mean = sum(abs(float(chunk[i])) for i in places) / count
    for high in (True, False):
        half = [i for i in places if (abs(float(chunk[i])) >= mean) == high]
        for i in half:
            magnitude = torch.tensor(sum(abs(float(chunk[j])) for j in half) / len(half)).bfloat16().double()
            found[i] = magnitude if chunk[i] > 0 else -magnitude
    return found


@given(size=st.integers(9, 300), count=st.sampled_from([4, 8]), seed=st.integers(0, 99))
def test_it_sends_two_magnitudes_of_the_greatest(size: int, count: int, seed: int) -> None:
    value = heavy_tailed(size, seed=seed)
    read = to_and_fro(SparseLoCo(count), value)
    torch.testing.assert_close(read.double(), naive(value, count), rtol=0, atol=0)


def test_chunks_are_even_and_have_their_own_magnitudes() -> None:
    value = gaussian(5000) * torch.cat([torch.full((2500,), 1e-6), torch.ones(2500)])
    read = to_and_fro(SparseLoCo(8), value)
    for half in (slice(0, 2500), slice(2500, 5000)):
        torch.testing.assert_close(read[half].double(), naive(value[half], 8), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "count", "size"),
    [((512, 512), 64, 64 * (4 + 112)), ((4096,), 32, 4 + 56), ((5000,), 8, 2 * (4 + 14)), ((9,), 64, 4 + 21)],
)
def test_fourteen_bits_a_value(shape: tuple[int, ...], count: int, size: int) -> None:
    value = gaussian(*shape)
    assert SparseLoCo(count).packed(spec_of(value)).bytes == size == SparseLoCo(count).pack(value).nbytes


def test_a_small_tensor_is_sent_with_all_its_values() -> None:
    value = gaussian(50)
    assert torch.equal(to_and_fro(SparseLoCo(64), value).sign(), value.sign())


def test_what_did_not_change_stays() -> None:
    """Such as the row of an embedding that no sample has."""
    value = torch.zeros(300)
    value[7:30] = gaussian(23)
    read = to_and_fro(SparseLoCo(64), value)
    assert torch.equal(read.sign(), value.sign())
    torch.testing.assert_close(read[7:30].double(), naive(value[7:30], 23), rtol=0, atol=0)


def test_five_percent_of_what_is_left_out_is_forgotten() -> None:
    state, meant = state_at(0), torch.zeros(30, 20)
    for step in range(20):
        value = gaussian(30, 20, seed=step)
        meant = 0.95 * meant + value
        meant -= to_and_fro(SparseLoCo(8), value, state)
        torch.testing.assert_close(state.memory["left_out"], meant, atol=1e-5, rtol=1e-5)
    assert float(meant.norm()) > 0


@pytest.mark.parametrize("text", ["sparseloco:0", "sparseloco:6", "sparseloco:4100", "sparseloco:x", "sparseloco:²"])
def test_options_that_make_no_sense(text: str) -> None:
    with pytest.raises(CodecError, match="no number of values") as caught:
        codec(text)
    assert "sparseloco:64" in str(caught.value.hint)
