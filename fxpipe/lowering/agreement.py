"""How far a step is from eager PyTorch's: the numbers of both, and their relative errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fxpipe.stages.compare import wide_dtype

LIMIT = 1e-4
"""The largest relative error that counts as right; `own_rounding` examines larger ones."""
FLOOR = 1e-3  # errors are relative to the tensor's norm, or to this part of the largest gradient's if larger
SMALLEST = 1e-3
"""The error of a metric nearer to zero than this is relative to this."""
CANCELS = 1e5
"""A loss whose terms cancel is rounding: its error is relative to this many last bits of the largest gradient's
norm."""


@dataclass(frozen=True)
class Agreement:
    """Largest relative errors against eager PyTorch.

    Attributes:
        gradients, buffers: of each parameter's gradient, and of each buffer's new value, by name.
        not_compared: why loss and gradients were not compared, and have no errors; '' if they were.
        not_finite: what is infinite or NaN in eager PyTorch itself: of these only the positions of such values were
            compared. Buffers, such as masks, may be infinite.
        zero: the parameters whose gradients are zero in eager PyTorch, so that this batch says little of them.
        metrics: of each metric, against its value on the whole batch, or what its values on the microbatches make.
        rounding: the errors that rounding explains, by gradient, or `THE_LOSS`; the fields above leave them out.
        cause: why rounding does not explain a remaining error.
        notes: remarks on how it was compared.
    """

    loss: float
    gradients: dict[str, float]
    buffers: dict[str, float]
    not_compared: str = ""
    not_finite: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    rounding: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[str, float]:
        """The largest error, and the name of what has it."""
        found = {"the loss": self.loss} | {f"the gradient of {n}": error for n, error in self.gradients.items()}
        found |= {f"the new value of {n}": error for n, error in self.buffers.items()}
        found |= {f"the metric {n}": error for n, error in self.metrics.items()}
        return max(found.items(), key=lambda item: item[1])

    @property
    def worst_gradient(self) -> tuple[str, float]:
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def largest(self) -> float:
        return self.worst[1]


def worst_agreement(agreements: Iterable[Agreement]) -> Agreement:
    """The agreement with the largest error of several, with a note if another could not be compared."""
    found = list(agreements)
    worst = max(found, key=lambda agreement: agreement.largest)
    return replace(
        worst,
        not_compared=next((a.not_compared for a in found if a.not_compared), ""),
        not_finite=_each(*(a.not_finite for a in found)),
        zero=tuple(name for name in found[0].zero if all(name in a.zero for a in found)),
        rounding={name: error for a in found for name, error in a.rounding.items()},
        notes=_each(*(a.notes for a in found)),
    )


def _each(*names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))


@dataclass(frozen=True)
class Step:
    """The result of one minibatch: the loss, the mean gradients and the buffers' values after it, by first names.

    `metrics` has an entry for each batch stepped on: the whole minibatch, or each microbatch.
    `draws_again`: backward has drawn random numbers.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    metrics: tuple[dict[str, float], ...] = ()
    draws_again: bool = False


def compare(found: Step, eager: Step, floor: float = FLOOR) -> Agreement:
    """How far a step is from eager PyTorch's; a gradient that only one of them has is infinitely far, unless zero.

    Args:
        floor: errors of gradients are relative to this part of the largest gradient's norm, if their own is less; the
            error of the loss, too, but to no more than `CANCELS` allows.
    """
    # In float64: the norm of a float16 may be infinite. An infinite gradient would hide what is wrong with all others.
    norms = {n: g.detach().to(wide_dtype(g)).norm().item() for n, g in eager.gradients.items()}
    largest = max((norm for norm in norms.values() if math.isfinite(norm)), default=0.0)
    scale = floor * largest
    gradients = {n: relative_error(found.gradients.get(n), g, scale) for n, g in eager.gradients.items()}
    gradients |= {n: math.inf for n, g in found.gradients.items() if n not in eager.gradients and g.any()}
    return Agreement(
        loss=relative_error(found.loss, eager.loss, min(floor, CANCELS * _eps(eager.loss)) * largest),
        gradients=gradients,
        buffers={n: relative_error(found.buffers[n], b, 0.0) for n, b in eager.buffers.items()},
        not_finite=_each(
            () if bool(eager.loss.isfinite()) else ("the loss",),
            [f"the gradient of {n}" for n, g in eager.gradients.items() if not g.isfinite().all()],
            [n for n, b in eager.buffers.items() if b.isnan().any()],  # a mask's infinities are meant
        ),
        zero=tuple(n for n, norm in norms.items() if norm == 0 and eager.gradients[n].numel()),
    )


def of_minibatch(eager: Step, weights: Sequence[float] = ()) -> list[dict[str, float]]:
    """What the metrics of a minibatch may be, computed from its microbatches: means, sums, weighted means."""
    rows, count = eager.metrics, len(eager.metrics)
    names = rows[0] if rows else ()
    found = [{n: sum(row[n] for row in rows) / divisor for n in names} for divisor in (count, 1)]
    if weights:
        found.append({n: sum(w * row[n] for w, row in zip(weights, rows, strict=True)) / count for n in names})
    return found


def metric_errors(found: Step, expected: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How far each metric is from the nearest of its possible values, relative to that value."""
    (own,) = found.metrics
    return {name: min(_off(value, one[name]) for one in expected) for name, value in own.items()}


def _off(found: float, expected: float) -> float:
    if not math.isfinite(expected):
        return 0.0 if found == expected or (math.isnan(found) and math.isnan(expected)) else math.inf
    return abs(found - expected) / max(abs(expected), SMALLEST)


def _eps(loss: torch.Tensor) -> float:
    return torch.finfo(loss.dtype).eps if loss.dtype.is_floating_point else 0.0


def relative_error(found: torch.Tensor | None, expected: torch.Tensor, floor: float) -> float:
    """The norm of the difference over the norm of what is expected, or over `floor` if that is more.

    Infinite if `found` is missing or of another shape, or if other values are infinite or NaN than expected.
    """
    if found is None or found.shape != expected.shape:
        return math.inf
    if found.numel() == 0:
        return 0.0
    wide = wide_dtype(expected)
    found, expected = found.detach().to(wide), expected.detach().to(wide)
    difference = (found - expected).norm().item()
    if not math.isfinite(difference):
        return 0.0 if torch.allclose(found, expected, equal_nan=True) else math.inf
    return difference / max(expected.norm().item(), floor, 1e-30)
