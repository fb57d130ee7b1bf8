"""A sender's random numbers: uniform, the same for the same place, and no one else's."""

from __future__ import annotations

import torch
from packed_values import state_at

LIKE = torch.empty(300, 333)


def test_the_same_place_gives_the_same_numbers() -> None:
    for draw in ("uniform", "random_int16"):
        first, again, other = (getattr(state_at(3, "edge", place), draw)(LIKE) for place in (1, 1, 2))
        assert first.shape == LIKE.shape
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_torchs_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    state_at(0).uniform(LIKE)
    state_at(0).random_int16(LIKE)
    assert torch.equal(torch.get_rng_state(), before)


def test_int16_are_uniform_over_all_of_them() -> None:
    drawn = state_at(0).random_int16(LIKE).flatten()
    assert drawn.dtype == torch.int16
    for place in range(4):  # of the four that come from one word
        counts = torch.histc(drawn[place::4].float(), bins=64, min=-32768, max=32767)
        expected = counts.sum() / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < 120  # χ² with 63 degrees of freedom: p < 2e-5
    assert int(drawn.min()) < -32700
    assert int(drawn.max()) > 32700


def test_any_count_and_shape() -> None:
    for shape in ((), (0,), (1,), (3,), (5, 7)):
        assert state_at(0).random_int16(torch.empty(shape)).shape == shape
