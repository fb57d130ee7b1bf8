"""What a step's scaling of the loss was: for the metrics, the display and the summary of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScaledStep:
    """A step under a loss scale.

    Attributes:
        scale: what its loss was multiplied by.
        skipped: whether it made no update, because gradients overflowed.
    """

    scale: float
    skipped: bool
