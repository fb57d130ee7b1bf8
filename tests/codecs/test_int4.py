"""`int4` against its formula: packing, rotation where it errs less, rounding at random against its mean."""

from __future__ import annotations

import pytest
import torch
from packed_values import gaussian, heavy_tailed, state_at, to_and_fro
from torch import Tensor

from fxpipe.codecs.int4 import STEPS, TILE, Int4, hadamard_of


def naive(tile: Tensor) -> Tensor:
    """One tile by the formula, in float64 but for the scale: the better of both forms."""
    hadamard = hadamard_of(TILE, tile.device).double()
    candidates = []
    for turn in (torch.eye(TILE, dtype=torch.float64), hadamard):
        form = tile.double() @ turn
        exact = float(form.abs().max()) / STEPS
        scale = torch.tensor(exact).bfloat16()
        if float(scale) < exact:
            scale = torch.nextafter(scale, torch.tensor(torch.inf).bfloat16())
        candidates.append((form / float(scale)).round() * float(scale) @ turn)
    return min(candidates, key=lambda read: float((read - tile).norm()))


@pytest.mark.parametrize("made", [gaussian, heavy_tailed])
def test_every_tile_is_the_better_of_both_forms(made: object) -> None:
    value = made(200, TILE)  # type: ignore[operator]
    read = to_and_fro(Int4(), value)
    expected = torch.stack([naive(tile) for tile in value])
    errors, least = (read - value).norm(dim=1), (expected - value).norm(dim=1)
    assert bool((errors <= least * 1.001 + 1e-6).all())


def test_at_random_the_better_form_is_the_one_that_is_expected_to_err_less() -> None:
    """A value of r steps past a whole one errs r·(1 - r) steps² on average: nearly nothing, where nearest is exact."""
    value = heavy_tailed(400, TILE)
    expected = []
    for form in (value, value @ hadamard_of(TILE, value.device)):
        scale = (form.abs().amax(1, keepdim=True) / STEPS).double()
        rest = (form / scale) % 1
        expected.append((rest * (1 - rest) * scale**2).sum(1))
    clear = (expected[0] / expected[1]).log().abs() > 0.05
    scales = Int4().pack(value, state_at(0))[: 2 * len(value)].view(torch.bfloat16)
    assert torch.equal(scales[clear] < 0, (expected[1] < expected[0])[clear])
    assert int(clear.sum()) > 300
    nearest = Int4().pack(value)[: 2 * len(value)].view(torch.bfloat16)
    assert not torch.equal(nearest < 0, scales < 0)


def test_hadamard_is_orthonormal_and_symmetric() -> None:
    matrix = hadamard_of(TILE, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix, torch.eye(TILE))
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix.abs(), torch.full((TILE, TILE), TILE**-0.5))


def test_rotation_spreads_outliers() -> None:
    """Of tiles with an outlier of 30, it leaves little more than half of the error of their own step."""
    value = gaussian(500, TILE)
    value[:, 3] = 30
    plain = value / (30 / STEPS)
    unturned = ((plain.round() - plain) * 30 / STEPS).norm()
    assert float((to_and_fro(Int4(), value) - value).norm()) < 0.6 * float(unturned)


def test_a_tile_with_one_value_is_not_spoilt() -> None:
    """There, its own form is exact; tiles of few levels, too."""
    value = torch.zeros(3, TILE)
    value[0, 7] = 7.0
    value[1] = torch.arange(TILE) % 15 - 7.0
    assert torch.equal(to_and_fro(Int4(), value), value)


def test_two_values_a_byte() -> None:
    value = (torch.arange(TILE) % 15 - 7.0).flip(0)
    packed = Int4().pack(value)
    assert packed[:2].view(torch.bfloat16).item() == 1.0
    assert torch.equal(packed[2:] & 15, (value[:16] + 8).to(torch.uint8))
    assert torch.equal(packed[2:] >> 4, (value[16:] + 8).to(torch.uint8))


@pytest.mark.parametrize("made", [gaussian, heavy_tailed])
def test_at_random_is_right_on_average(made: object) -> None:
    """1,500 messages: the mean of each of 640 values is within 5 standard errors."""
    value, draws = made(20, TILE), 1500  # type: ignore[operator]
    total, square = (torch.zeros(20, TILE, dtype=torch.float64) for _ in range(2))
    for draw in range(draws):
        error = (to_and_fro(Int4(), value, state_at(draw)) - value).double()
        total += error
        square += error * error
    standard_error = (square / draws).sqrt() / draws**0.5 + 2e-6 * value.abs().amax(1, keepdim=True)
    assert float((total / draws / standard_error).abs().max()) < 5
