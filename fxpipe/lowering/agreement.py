"""How far a step is from eager PyTorch's: the numbers of both, and their relative errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fxpipe.stages.compare import FLOOR, norm, relative_error

CANCELS = 1e5
"""A loss whose terms cancel is rounding: its error is relative to this many last bits of the largest gradient's
norm."""


@dataclass(frozen=True)
class Agreement:
    """Largest relative errors against eager PyTorch.

    Metrics are compared with their values on the whole batch, or with what their values on the microbatches make. Of
    what is `not_finite` in eager PyTorch itself only the positions of such values were compared; buffers, such as
    masks, may be infinite. `rounding` has the errors that rounding explains, by gradient, or `THE_LOSS`; other fields
    leave them out.
    """

    loss: float
    gradients: dict[str, float]
    buffers: dict[str, float]
    not_compared: str = ""  # why loss and gradients were not, and have no errors
    not_finite: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()  # parameters whose gradients are zero in eager PyTorch: this batch says little of them
    metrics: Mapping[str, float] = field(default_factory=dict)
    rounding: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""  # why rounding does not explain a remaining error
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
        not_finite=each_once(*(a.not_finite for a in found)),
        zero=tuple(name for name in found[0].zero if all(name in a.zero for a in found)),
        rounding={name: error for a in found for name, error in a.rounding.items()},
        notes=each_once(*(a.notes for a in found)),
    )


def each_once(*names: Sequence[str]) -> tuple[str, ...]:
    """All names of some lists, in their order."""
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


def agreement_of(found: Step, eager: Step, floor: float = FLOOR) -> Agreement:
    """How far a step is from eager PyTorch's; a gradient that only one of them has is infinitely far, unless zero.

    Errors of gradients are relative to `floor` of the largest gradient's norm, if their own is less; the error of the
    loss, too, but to no more than `CANCELS` allows.
    """
    norms = {name: norm(gradient) for name, gradient in eager.gradients.items()}
    # An infinite gradient would hide what is wrong with all others.
    largest = max(filter(math.isfinite, norms.values()), default=0.0)
    errors = {n: _error(found.gradients.get(n), g, floor * largest) for n, g in eager.gradients.items()}
    errors |= {n: math.inf for n, g in found.gradients.items() if n not in eager.gradients and g.any()}
    return Agreement(
        loss=relative_error(found.loss, eager.loss, min(floor, CANCELS * _eps(eager.loss)) * largest),
        gradients=errors,
        buffers={n: relative_error(found.buffers[n], b) for n, b in eager.buffers.items()},
        not_finite=each_once(
            () if bool(eager.loss.isfinite()) else ("the loss",),
            [f"the gradient of {n}" for n, size in norms.items() if not math.isfinite(size)],
            [n for n, b in eager.buffers.items() if b.isnan().any()],  # a mask's infinities are meant
        ),
        zero=tuple(n for n, size in norms.items() if size == 0 and eager.gradients[n].numel()),
    )


def _error(found: torch.Tensor | None, expected: torch.Tensor, least: float) -> float:
    """The relative error; quickly for equal tensors, as those of one microbatch mostly are."""
    is_equal = found is not None and found.dtype == expected.dtype and torch.equal(found, expected)
    return 0.0 if is_equal else relative_error(found, expected, least)


def of_minibatch(eager: Step, weights: Sequence[float] = ()) -> list[dict[str, float]]:
    """What the metrics of a minibatch may be, computed from its microbatches: means, sums, weighted means."""
    rows, count = eager.metrics, len(eager.metrics)
    names = rows[0] if rows else ()
    found = [{n: sum(row[n] for row in rows) / divisor for n in names} for divisor in (count, 1)]
    if weights:
        found.append({n: sum(w * row[n] for w, row in zip(weights, rows, strict=True)) / count for n in names})
    return found


def metric_errors(found: Step, expected: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How far each metric is from the nearest of its possible values, relative to that value, or to `FLOOR`."""
    (metrics,) = found.metrics
    return {
        name: min(relative_error(_number(value), _number(one[name]), FLOOR) for one in expected)
        for name, value in metrics.items()
    }


def _number(metric: float) -> torch.Tensor:
    return torch.tensor(metric, dtype=torch.float64)


def _eps(loss: torch.Tensor) -> float:
    return torch.finfo(loss.dtype).eps if loss.dtype.is_floating_point else 0.0
