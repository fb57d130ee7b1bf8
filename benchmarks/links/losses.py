"""After how many minibatches a training has reached a loss."""

from __future__ import annotations

from collections.abc import Sequence

TOLERANCE = 1e-3
"""By which share of the loss a training may be above it: synchronous ones differ by rounding."""


def smoothed(losses: Sequence[float], width: int) -> list[float]:
    """Means of the last `width` of them, or as many as there are."""
    return [sum(losses[max(0, k - width) : k]) / min(k, width) for k in range(1, len(losses) + 1)]


def minibatches_to(goal: float, losses: Sequence[float], width: int) -> int | None:
    """The first minibatch from `width` on whose smoothed loss is there; None if there is none."""
    means = smoothed(losses, width)
    return next((k + 1 for k in range(width - 1, len(means)) if means[k] <= goal * (1 + TOLERANCE)), None)
