"""`topk` and `lowrank`: what they send, and that what they leave out comes with later messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_values import gaussian, heavy_tailed, spec_of, state_at, to_and_fro

from fxpipe.codecs import codec
from fxpipe.codecs.lowrank import LowRank
from fxpipe.codecs.topk import TopK, greatest
from fxpipe.errors import CodecError

BOTH = pytest.mark.parametrize("text", ["topk:0.05", "lowrank:2"])


@BOTH
def test_nothing_is_lost(text: str) -> None:
    """After every message: all that has arrived, and what is still left out, is all that was meant."""
    state = state_at(0)
    meant, arrived = torch.zeros(30, 20, dtype=torch.float64), torch.zeros(30, 20, dtype=torch.float64)
    for step in range(50):
        value = gaussian(30, 20, seed=step)
        meant += value
        arrived += to_and_fro(codec(text), value, state)
        torch.testing.assert_close(arrived + state.memory["left_out"], meant, atol=1e-4, rtol=1e-4)


@BOTH
def test_the_mean_of_what_arrives_converges(text: str) -> None:
    """To that of what was meant, as 1/steps; without memory it stays where it is."""
    value = gaussian(30, 20)

    def miss(steps: int, keep: bool) -> float:
        state, total = state_at(0), torch.zeros(30, 20)
        for _ in range(steps):
            total += to_and_fro(codec(text), value, state if keep else state_at(0))
        return float((total / steps - value).norm() / value.norm())

    assert miss(400, keep=True) < 0.05
    assert miss(400, keep=True) < 0.3 * miss(40, keep=True)
    assert miss(40, keep=False) > 0.5


@BOTH
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_message_that_is_not_finite_leaves_the_memory_alone(text: str, wrong: float) -> None:
    state = state_at(0)
    to_and_fro(codec(text), gaussian(30, 20), state)
    before = {name: tensor.clone() for name, tensor in state.memory.items()}
    value = gaussian(30, 20, seed=1)
    value[3, 4] = wrong
    assert not to_and_fro(codec(text), value, state)[3, 4].isfinite()
    assert before.keys() == state.memory.keys()
    assert all(torch.equal(tensor, state.memory[name]) for name, tensor in before.items())
    assert bool(to_and_fro(codec(text), gaussian(30, 20, seed=2), state).isfinite().all())


@BOTH
def test_it_begins_well_after_a_first_message_that_is_not_finite(text: str) -> None:
    state = state_at(0)
    to_and_fro(codec(text), torch.full((30, 20), torch.nan), state)
    value = gaussian(30, 2) @ gaussian(2, 20, seed=1)
    for _ in range(3):
        read = to_and_fro(codec(text), value, state)
        assert bool(read.isfinite().all())
        assert float(read.norm()) > 0


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_what_narrow_dtypes_receive_is_in_range(text: str, dtype: torch.dtype) -> None:
    value, state = torch.full((30, 20), 60000.0, dtype=dtype), state_at(0)
    for _ in range(30):
        read = to_and_fro(codec(text), value, state)
        assert read.dtype == dtype
        assert bool(read.isfinite().all())


def test_topk_sends_the_greatest_as_they_are() -> None:
    value = heavy_tailed(37, 41)
    read = to_and_fro(TopK(0.1), value)
    sent = read != 0
    assert int(sent.sum()) == 152  # ⌈0.1 · 1517⌉
    assert torch.equal(read[sent], value[sent])
    assert float(value[sent].abs().min()) >= float(value[~sent].abs().max())
    places = TopK(0.1).pack(value)[:152]
    assert bool((places.diff() > 0).all())


@given(count=st.integers(1, 12), size=st.integers(40, 900), seed=st.integers(0, 99), wrong=st.integers(0, 20))
def test_the_greatest_are_those_that_topk_selects(count: int, size: int, seed: int, wrong: int) -> None:
    """Ties, infinite ones and NaN among them."""
    magnitudes = (heavy_tailed(size, seed=seed).abs() * 3).round()
    magnitudes[:: size // 20][:wrong] = torch.inf if seed % 2 else torch.nan
    places = greatest(magnitudes, count)
    assert len(set(places.tolist())) == count
    expected = magnitudes.topk(count).values
    torch.testing.assert_close(magnitudes[places].sort(descending=True).values, expected, equal_nan=True)


def test_lowrank_is_exact_where_the_rank_suffices() -> None:
    for rank in (1, 2, 4):
        for shape in ((50, 30), (30, 50)):
            value = gaussian(shape[0], rank, seed=1) @ gaussian(rank, shape[1], seed=2)
            read = to_and_fro(LowRank(4), value, state_at(0))
            torch.testing.assert_close(read, value, atol=1e-4, rtol=1e-4)


def test_lowrank_comes_near_to_the_best_approximation() -> None:
    """Of a matrix that is sent again and again, without what is carried over: the basis goes on."""
    left, right = torch.linalg.qr(gaussian(60, 20)).Q, torch.linalg.qr(gaussian(40, 20, seed=1)).Q
    value = left * torch.arange(20, 0, -1) ** 2 @ right.T
    u, s, v = torch.linalg.svd(value)
    best = float((value - u[:, :4] * s[:4] @ v[:4]).norm())
    state = state_at(0)
    errors = []
    for _ in range(25):
        state.memory.pop("left_out", None)
        errors.append(float((to_and_fro(LowRank(4), value, state) - value).norm()))
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.001 * best


def test_lowrank_recovers_from_zeros() -> None:
    """A basis that a matrix of zeros leaves must not be zeros, too."""
    state, value = state_at(0), gaussian(30, 2) @ gaussian(2, 20, seed=1)
    assert not to_and_fro(LowRank(2), torch.zeros(30, 20), state).any()
    for _ in range(4):
        state.memory.pop("left_out")
        read = to_and_fro(LowRank(2), value, state)
    torch.testing.assert_close(read, value, atol=1e-4, rtol=1e-4)


def test_lowrank_flattens_all_dimensions_but_the_last() -> None:
    value = gaussian(5, 6, 20)
    flat = to_and_fro(LowRank(3), value.view(30, 20), state_at(0))
    assert torch.equal(to_and_fro(LowRank(3), value, state_at(0)), flat.view(5, 6, 20))
    assert LowRank(3).packed(spec_of(value)).shape == (3 * (30 + 20),)


@pytest.mark.parametrize(
    ("text", "shape", "words"),
    [
        ("lowrank", (100,), "two dimensions"),
        ("lowrank", (), "two dimensions"),
        ("lowrank:4", (8, 8), "makes smaller"),
        ("lowrank:4", (0, 8), "makes smaller"),
        ("topk:0.5", (100,), "makes smaller"),
        ("topk", (0,), "makes smaller"),
        ("topk", (2**16, 2**15), "2³¹"),
    ],
)
def test_refusals(text: str, shape: tuple[int, ...], words: str) -> None:
    value = torch.empty((), dtype=torch.float32).expand(shape)
    assert words in codec(text).refusal(spec_of(value))


@pytest.mark.parametrize(
    "text",
    [
        "topk:0",
        "topk:1.5",
        "topk:-1",
        "topk:nan",
        "topk:x",
        "topk:",
        "lowrank:0",
        "lowrank:1.5",
        "lowrank:²",
        "lowrank:",
    ],
)
def test_options_that_make_no_sense(text: str) -> None:
    with pytest.raises(CodecError, match=text) as caught:
        codec(text)
    assert caught.value.hint
