"""What counts as rounding and what does not."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fxpipe.stages.compare import Difference, Expected, compare, rounding_alone, tolerance


def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], summed: bool = False) -> dict[str, float]:
    rows = {name: Expected(value, "kind", summed) for name, value in expected.items()}
    return {d.output: d.error for d in compare(found, rows, nan_equals_nan=True)}


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min, -1e9, -1e4, -float("inf")])
@pytest.mark.parametrize("masks", [1, 3])
@pytest.mark.parametrize("summed", [False, True])
def test_a_mask_beside_it_hides_no_error(mask: float, masks: int, summed: bool) -> None:
    torch.manual_seed(0)
    expected = {"hidden": torch.randn(4, 6, 8), "other": torch.randn(4, 6, 8)}
    expected |= {f"mask {i}": torch.full((4, 6, 6), mask) for i in range(masks)}
    found = {**expected, "hidden": expected["hidden"] * 1.01}
    assert errors(found, expected, summed)["hidden"] == pytest.approx(0.01, rel=0.1)


def test_a_mask_within_a_tensor_hides_no_error() -> None:
    torch.manual_seed(0)
    scores = torch.randn(4, 8, 8)
    scores[:, :, 5:] -= 1e9
    wrong = scores.clone()
    wrong[:, :, :5] *= 1.01
    assert errors({"scores": wrong}, {"scores": scores})["scores"] == pytest.approx(0.01, rel=0.1)
    masked = scores.clone()
    masked[:, :, 5:] *= 1.01
    assert errors({"scores": masked}, {"scores": scores})["scores"] == pytest.approx(0.01, rel=0.1)


def test_noise_is_measured_by_its_peers() -> None:
    torch.manual_seed(0)
    expected = {"mean": torch.randn(64) * 1e-8} | {f"x{i}": torch.randn(64, 8) for i in range(5)}
    found = {**expected, "mean": torch.randn(64) * 1e-8}
    assert errors(found, expected)["mean"] < 1e-4


def test_what_is_missing_or_of_another_kind_is_infinitely_wrong() -> None:
    one = torch.ones(3)
    for found in ({}, {"x": torch.ones(4)}, {"x": one.double()}, {"x": one * math.nan}, {"x": one / 0}):
        assert errors(found, {"x": one})["x"] == math.inf
    assert errors({"x": torch.tensor([1, 2])}, {"x": torch.tensor([1, 3])})["x"] == math.inf
    assert errors({"x": torch.tensor([1.0, math.inf])}, {"x": torch.tensor([1.0, -math.inf])})["x"] == math.inf
    assert errors({"x": torch.tensor([True])}, {"x": torch.tensor([False])})["x"] == math.inf
    assert errors({"x": one * math.nan}, {"x": one * math.nan})["x"] == 0
    assert compare({"x": one * math.nan}, {"x": Expected(one * math.nan)})[0].error == math.inf
    assert compare({"x": one}, {})[0].error == math.inf, "nobody expects it"


def test_what_is_right() -> None:
    for x in (torch.tensor([1.0, -math.inf]), torch.zeros(0), torch.tensor([1, 2]), torch.tensor(True), torch.ones(())):
        assert errors({"x": x.clone()}, {"x": x})["x"] == 0
    assert tolerance(["float32", "int64"]) == 1e-4
    assert tolerance(["float32", "float16"]) == 1e-2
    assert tolerance(["float32"], "bf16") == tolerance(["bfloat16", "float16"]) == 1e-1


def test_an_error_may_be_rounding_alone() -> None:
    """Of two sums of what cancels neither is right; but an engine must not be farther off than eager."""
    exact = torch.tensor([1e-9], dtype=torch.float64)
    expected = {"bias": Expected(torch.tensor([4e-6]), "gradient", True)}
    off = Difference("bias", 1e-3)

    def verdict(value: float, difference: Difference = off) -> bool:
        return rounding_alone(difference, {"bias": torch.tensor([value])}, expected, ["bias"], lambda: [exact])

    assert verdict(1e-8)
    assert verdict(-6e-6)
    assert not verdict(1e-4)
    assert not verdict(1e-8, Difference("bias", math.inf))

    def fails() -> list[Tensor]:
        raise TypeError("expected float32")

    assert not rounding_alone(off, {"bias": torch.tensor([1e-8])}, expected, ["bias"], fails)
