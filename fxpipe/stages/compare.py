"""How far values are from the expected ones: this decides whether an engine or an exported model is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpipe.device_copies import widened

EXACT = 1e-4
"""The largest relative error that counts as right; rounding alone may explain a larger one."""

TOLERANCE = {"float16": 1e-2, "bfloat16": 1e-1}
"""The same for what is not computed in float64, by the coarsest of the values' dtypes; else `EXACT`."""

FLOOR = 1e-3
"""Errors are relative to the tensor's norm, or to this fraction of what is usual among its peers, if that is larger."""

FLOOR_OF_SUMS = 1e-2
"""The same for gradients: if terms cancel, as for a bias before a batch norm, only rounding is left."""

AMPLIFIED = 1e-2
"""The largest relative error that counts as rounding where a step amplifies it, or is computed in other dtypes."""

HUGE = 1e3
"""Elements this many times larger than usual, like the −1e9 of a mask, are compared separately."""

SLACK, SLACK_OF_ENGINES = 3, 10
"""If both errors are only rounding, that of a captured step, or of an engine, may be this many times larger than
eager's, or than the effect of a rounding error in every weight: of a few numbers, which one order of summation happened
to round well, an engine rounded 3.2 times as far."""

NAN = "is NaN in the stage's own code, so nothing can be compared"


@dataclass(frozen=True)
class Expected:
    """What an output should be.

    Attributes:
        peers: outputs with the same text here are of one kind; a tensor that is only noise around zero is measured
            against the others of its kind.
        summed: whether outputs of its kind have very different sizes (gradients): their floor then depends on their
            norms, and otherwise on the roots of their mean squares.
    """

    value: Tensor
    peers: str = ""
    summed: bool = False


@dataclass(frozen=True)
class Difference:
    """How far one output is off: its relative error; or `inf`, with the reason."""

    output: str
    error: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.output} {self.reason or f'is off by {self.error:.1e}, relative to its norm'}"


def norm(value: Tensor) -> float:
    """The Euclidean norm of all elements."""
    return widened(value).norm().item()  # in float16 it may be infinite


def distance(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference; infinite for tensors of different shapes."""
    if actual.shape != expected.shape:
        return math.inf
    return norm(widened(actual) - widened(expected))


def relative_error(actual: Tensor | None, expected: Tensor, least: float = 0.0) -> float:
    """The norm of the difference over the norm of what is expected, or over `least` if that is more.

    Infinite if `actual` is missing or of another shape, or if other values are infinite or NaN than expected.
    """
    if actual is None or actual.shape != expected.shape:
        return math.inf
    off = distance(actual, expected)
    if math.isfinite(off):
        return off / max(norm(expected), least, 1e-30)
    return 0.0 if torch.allclose(widened(actual), widened(expected), equal_nan=True) else math.inf


def error_of_all(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The relative error of all tensors together, as if they were one; `actual` has all that are expected."""
    off = math.hypot(*(distance(actual[name], value) for name, value in expected.items()))
    return off / max(math.hypot(*map(norm, expected.values())), 1e-30)


def tolerance(dtypes: Iterable[str | torch.dtype], autocast: str | None = None) -> float:
    """The largest relative error that counts as right if these dtypes take part."""
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes} | ({"bfloat16"} if autocast else set())
    return max((limit for dtype, limit in TOLERANCE.items() if dtype in names), default=EXACT)


def compare(
    actual: Mapping[str, Tensor], expected: Mapping[str, Expected], *, nan_equals_nan: bool = False
) -> list[Difference]:
    """How far every expected output is off, and every output that is not expected.

    An error is the norm of the difference over the norm of the expected value. Whole numbers and truth values must be
    equal. The error is infinite if an output is missing, has another shape or dtype, or is infinite or NaN in other
    places.

    Args:
        nan_equals_nan: whether an expected NaN is right; if not, an output that should have one counts as wrong.
    """
    floors = _floors(expected)
    differences = [
        _difference(name, actual.get(name), row.value, floors[name], nan_equals_nan) for name, row in expected.items()
    ]
    return differences + [
        Difference(n, math.inf, "is an output that is not expected") for n in actual if n not in expected
    ]


def in_words(differences: Sequence[Difference], most: int = 5) -> str:
    """The first `most` differences, and how many more there are."""
    more = f"; and {len(differences) - most} more outputs" if len(differences) > most else ""
    return "; ".join(map(str, differences[:most])) + more


def rounding_alone(
    difference: Difference,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Expected],
    names: Sequence[str],
    exact: Callable[[], Sequence[Tensor]],
) -> bool:
    """Whether a wrong output is as near to the exact result as the expected value is, up to `SLACK_OF_ENGINES`.

    If all terms of a sum cancel, as in the gradient of a bias before a batch norm, eager's value is only rounding:
    another order of summation gives another value, and both are right. False if this cannot be decided.

    Args:
        names, exact: the outputs in float64.
    """
    if math.isinf(difference.error):
        return False
    try:
        truth = dict(zip(names, exact(), strict=True))[difference.output]
    except Exception:  # an operator that has no float64
        return False
    off, allowed = (distance(value, truth) for value in (actual[difference.output], expected[difference.output].value))
    return off <= SLACK_OF_ENGINES * allowed


def _difference(name: str, actual: Tensor | None, expected: Tensor, floor: float, nan_equals_nan: bool) -> Difference:
    expected = expected.detach().to(actual.device if actual is not None else "cpu")
    if actual is None:
        return Difference(name, math.inf, "is missing")
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return Difference(name, math.inf, f"is {_kind(actual)}, not {_kind(expected)}")
    if not expected.numel():
        return Difference(name, 0.0)
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = int((actual != expected).sum())
        reason = f"differs in {wrong} of {expected.numel()} elements"
        return Difference(name, math.inf, reason) if wrong else Difference(name, 0.0)
    if expected.isnan().any():
        if not nan_equals_nan:
            return Difference(name, math.inf, NAN)
        if not torch.equal(expected.isnan(), actual.isnan()):
            return Difference(name, math.inf, "is NaN in other places")
        numbers = ~expected.isnan()
        actual, expected = actual[numbers], expected[numbers]
    if actual.isnan().any():
        return Difference(name, math.inf, f"is NaN in {int(actual.isnan().sum())} of {actual.numel()} elements")
    infinite = expected.isinf() | actual.isinf()
    if not torch.equal(actual[infinite], expected[infinite]):
        return Difference(name, math.inf, "is infinite in other places")
    actual, expected = actual[~infinite], expected[~infinite]
    groups = zip(_groups(expected), (floor, 0.0), strict=True)
    return Difference(name, max(relative_error(actual[group], expected[group], least) for group, least in groups))


def _groups(value: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of the elements of usual size, and of those far above it: a mask of −1e9 would hide other errors."""
    size = widened(value.abs())
    usual = size[size > 0]
    if not usual.numel():
        return size >= 0, size < 0
    sample = usual[:: max(1, usual.numel() // 100_000)]
    high = size > HUGE * sample.median()
    return ~high, high


def _floors(expected: Mapping[str, Expected]) -> dict[str, float]:
    """By output, the least norm for its relative error: from the lower quartile of its peers, without masks."""
    peers: dict[str, list[float]] = {}
    for row in expected.values():
        if 0 < (size := _size(row)) < HUGE**2:
            peers.setdefault(row.peers, []).append(size)
    usual = {kind: sorted(sizes)[len(sizes) // 4] for kind, sizes in peers.items()}
    return {
        name: usual.get(row.peers, 0.0) * (FLOOR_OF_SUMS if row.summed else FLOOR * math.sqrt(row.value.numel()))
        for name, row in expected.items()
    }


def _size(row: Expected) -> float:
    """Norm, or root of the mean square, of the finite elements of usual size."""
    value = row.value.detach()
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return 0.0
    value = value[value.isfinite()]
    value = value[_groups(value)[0]]
    return norm(value) if row.summed or not value.numel() else norm(value) / math.sqrt(value.numel())


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
