"""How far values are from those that are right: what decides whether an engine or an exported model is right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-3
"""Errors are relative to the tensor's norm, or to this part of what is usual among its peers, if that is more."""

FLOOR_OF_SUMS = 1e-2
"""The same for gradients: where terms cancel, as in that of a bias before a batch norm, only rounding is left."""

TOLERANCE = {"float16": 1e-2, "bfloat16": 1e-1}
"""The largest relative error that is no mistake, by the coarsest type that takes part; `EXACT` for all others."""

EXACT = 1e-4

NAN = "is NaN in the stage's own code, so nothing can be compared"


@dataclass(frozen=True)
class Expected:
    """What an output should be.

    Attributes:
        peers: outputs of one name here are of one kind; a tensor of noise around zero is measured by the others.
        summed: of the kind whose members have very different sizes (gradients): the floor follows the largest norm,
            else the largest mean square.
    """

    value: Tensor
    peers: str = ""
    summed: bool = False


@dataclass(frozen=True)
class Difference:
    """How far one output is off, relative; `inf` where that cannot be said, and then why."""

    output: str
    error: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.output} {self.reason or f'is off by {self.error:.1e}, relative to its norm'}"


def tolerance(dtypes: Sequence[str], autocast: str | None = None) -> float:
    """What counts as right where these types take part."""
    found = {*dtypes, *(["bfloat16"] if autocast else [])}
    return max((limit for dtype, limit in TOLERANCE.items() if dtype in found), default=EXACT)


def compare(
    found: Mapping[str, Tensor], expected: Mapping[str, Expected], *, nan_equals_nan: bool = False
) -> list[Difference]:
    """How far every expected output is off, and every output that nobody expects.

    Errors are norms of differences over norms of what is expected. Whole numbers and truth values must be equal. What
    is missing, has another shape or type, or is infinite or NaN elsewhere, is infinitely wrong.

    Args:
        nan_equals_nan: whether a NaN that is expected is right; else nothing can be said of the output, which is wrong.
    """
    floors = _floors(expected)
    made = [
        _difference(name, found.get(name), row.value, floors[name], nan_equals_nan) for name, row in expected.items()
    ]
    return made + [Difference(n, math.inf, "is an output that nobody expects") for n in found if n not in expected]


def _difference(name: str, found: Tensor | None, expected: Tensor, floor: float, nan_equals_nan: bool) -> Difference:
    expected = expected.detach().to(found.device if found is not None else "cpu")
    if found is None:
        return Difference(name, math.inf, "is missing")
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return Difference(name, math.inf, f"is {_kind(found)}, not {_kind(expected)}")
    if not expected.numel():
        return Difference(name, 0.0)
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = int((found != expected).sum())
        reason = f"differs in {wrong} of {expected.numel()} elements"
        return Difference(name, math.inf, reason) if wrong else Difference(name, 0.0)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    if expected.isnan().any():
        if not nan_equals_nan:
            return Difference(name, math.inf, NAN)
        if not torch.equal(expected.isnan(), found.isnan()):
            return Difference(name, math.inf, "is NaN in other places")
        known = ~expected.isnan()
        found, expected = found[known], expected[known]
    if found.isnan().any():
        return Difference(name, math.inf, f"is NaN in {int(found.isnan().sum())} of {found.numel()} elements")
    infinite = expected.isinf() | found.isinf()
    if not torch.equal(found[infinite], expected[infinite]):
        return Difference(name, math.inf, "is infinite in other places")
    found, expected = found[~infinite], expected[~infinite]
    difference = (found - expected).norm().item()
    return Difference(name, difference / max(expected.norm().item(), floor, 1e-30))


def _floors(expected: Mapping[str, Expected]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for row in expected.values():
        largest[row.peers] = max(largest.get(row.peers, 0.0), _size(row))
    return {
        name: largest[row.peers] * (FLOOR_OF_SUMS if row.summed else FLOOR * math.sqrt(row.value.numel()))
        for name, row in expected.items()
    }


def _size(row: Expected) -> float:
    value = row.value.detach()
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return 0.0
    value = value.to(torch.complex128 if value.is_complex() else torch.float64)
    norm = value[value.isfinite()].norm().item()
    return norm if row.summed else norm / math.sqrt(value.numel())


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
