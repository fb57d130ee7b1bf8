"""How much batches count: by the hook `loss_weight`, or by their samples; and means with these weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fxpipe.errors import TaskError
from fxpipe.plan.plan import Plan
from fxpipe.task.batch import Batch

LossWeight = Callable[[Any], Any]
"""The hook `loss_weight(batch)`: how much a batch or a microbatch counts, a number of 0 or more."""


def weight_of(hook: LossWeight, batch: Any) -> float:
    """The hook's result as a number."""
    try:
        return float(hook(batch))
    except Exception as error:
        raise TaskError(
            f"loss_weight(batch) raised {type(error).__name__}: {error}",
            hint="it gets one microbatch, or a batch of eval_data(), and returns a number, such as how many tokens are "
            "not padded",
        ) from error


class LossWeights:
    """Weights for the batches of `eval_data()`: the user's hook if there is one, else the number of samples.

    The samples of a batch are counted in its first tensor that training cuts into microbatches, along that dimension,
    else along its first dimension; a batch without such a tensor counts as one sample.
    """

    def __init__(self, plan: Plan, loss_weight: LossWeight | None) -> None:
        self._dims = {leaf.name: leaf.dim for leaf in plan.step.given if leaf.tensor is not None}
        self._loss_weight, self._padding = loss_weight, plan.padding

    def __call__(self, batch: Any) -> float:
        """A number of 0 or more: the hook's for the padded batch, or the samples of the unpadded batch."""
        read = Batch.of(batch)
        if self._loss_weight is None:
            return self._samples(read)
        weight = weight_of(self._loss_weight, read.padded(self._padding).given)
        if not (math.isfinite(weight) and weight >= 0):
            raise TaskError(
                f"loss_weight(batch) gave {weight:g} for a batch of eval_data()", hint="weights are 0 or more"
            )
        return weight

    def _samples(self, batch: Batch) -> float:
        for leaf in batch.leaves:
            dim = self._dims.get(leaf.name, leaf.dim)
            if leaf.tensor is not None and dim is not None and dim < len(leaf.tensor.shape):
                return float(leaf.tensor.shape[dim])
        return 1.0


def weighted_means(rows: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """The mean of every metric over some batches, by the weight of each, summed in order.

    Metrics with weight 0 are not read: they may be NaN.
    """
    totals: dict[str, float] = {}
    whole = 0.0
    for weight, metrics in rows:
        whole += weight
        for name, value in metrics.items() if weight else ():
            totals[name] = totals.get(name, 0.0) + weight * value
    if not whole:
        raise TaskError(
            "all batches of eval_data() have weight 0: loss_weight(batch) is 0, or they have no samples",
            hint="give a batch with a weight above 0",
        )
    return {name: total / whole for name, total in totals.items()}
