"""`int8` against its formula, and rounding at random against its mean."""

from __future__ import annotations

import torch
from packed_values import gaussian, state_at, to_and_fro

from fxpipe.codecs.blocks import rounded
from fxpipe.codecs.int8 import BLOCK, STEPS, Int8


def steps_of(value: torch.Tensor) -> torch.Tensor:
    """The greatest step that a block may have, for each of its values: max|x| / 127, and the rounding of a scale."""
    return (value.view(-1, BLOCK).abs().amax(1, keepdim=True) / STEPS * (1 + 2**-7)).expand(-1, BLOCK)


def test_whole_numbers_up_to_127_are_exact() -> None:
    value = torch.arange(-127, 128).float().repeat(3)[: 11 * BLOCK]
    value.view(-1, BLOCK)[:, 0] = 127
    assert torch.equal(to_and_fro(Int8(), value), value)


def test_whole_numbers_stay_at_random_too() -> None:
    """Every 16 bits of a random number, for 1 and for 2: none is rounded away from what needs no rounding."""
    steps = torch.tensor([1.0, 2.0, -127.0]).repeat(2**16, 1)
    random = torch.arange(-(2**15), 2**15).to(torch.int16).unsqueeze(1).expand(-1, 3)
    assert torch.equal(rounded(steps.clone(), random), steps)
    steps = torch.full((2**16,), 5.25)
    assert float(rounded(steps, random[:, 0]).mean()) == 5.25


def test_at_random_is_within_a_step_and_right_on_average() -> None:
    """5,000 messages: the mean of each of 640 values is within 5 standard errors; nearest is off by up to 60."""
    value, draws = gaussian(10 * BLOCK), 5000
    total, square = torch.zeros(10 * BLOCK, dtype=torch.float64), torch.zeros(10 * BLOCK, dtype=torch.float64)
    for draw in range(draws):
        error = (to_and_fro(Int8(), value, state_at(draw)) - value).double()
        assert bool((error.abs().view(-1, BLOCK) <= steps_of(value)).all())
        total += error
        square += error * error
    standard_error = (square / draws).sqrt() / draws**0.5 + 1e-7
    assert float((total / draws / standard_error).abs().max()) < 5


def test_neighbours_are_rounded_independently() -> None:
    """Errors of two values of a block do not go together: their correlation over 2,000 messages is that of noise."""
    value = gaussian(BLOCK)
    errors = torch.stack([to_and_fro(Int8(), value, state_at(draw)) - value for draw in range(2000)])
    moving = errors[:, errors.std(0) > 0.1 * errors.std(0).max()]
    apart = torch.corrcoef(moving.T) - torch.eye(moving.shape[1])
    assert float(apart.abs().max()) < 5.5 / 2000**0.5


def test_an_outlier_costs_its_block_alone() -> None:
    value = gaussian(4 * BLOCK)
    value[5] = 1e6
    error = (to_and_fro(Int8(), value) - value).abs()
    assert float(error[BLOCK:].max()) < 0.02
