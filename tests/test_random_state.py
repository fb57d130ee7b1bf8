"""Random generators are kept, restored and seeded, all of them."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from fxpipe.random_state import (
    drew_without_torch,
    random_state,
    random_state_kept,
    seed_everything,
    set_random_state,
)


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_seeded_restored_and_kept() -> None:
    with random_state_kept():
        seed_everything(7)
        first = draw()
        state = random_state()
        second = draw()
        with random_state_kept():
            seed_everything(7)
            assert draw() == first
        third = draw()
        set_random_state(state)
        assert draw() == second
        assert draw() == third


def test_kept_on_an_error() -> None:
    before = random_state()
    with pytest.raises(KeyError), random_state_kept():
        raise KeyError(draw())
    assert not drew_without_torch(before)
    assert torch.equal(torch.get_rng_state(), before.cpu)


def test_who_drew() -> None:
    with random_state_kept():
        before = random_state()
        torch.rand(())
        assert not drew_without_torch(before)
        random.random()
        assert drew_without_torch(before)
        before = random_state()
        numpy.random.rand()
        assert drew_without_torch(before)
