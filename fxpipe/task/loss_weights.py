"""How much batches count: what the hook `loss_weight` gives for them, or their samples; and means by these weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fxpipe.errors import TaskError
from fxpipe.plan.spec import Plan
from fxpipe.task.batch import Batch

LossWeight = Callable[[Any], Any]
"""The hook `loss_weight(batch)`: how much a batch or a microbatch counts, a number of 0 or more."""


def weight_of(hook: LossWeight, batch: Any) -> float:
    """What the hook gives, as a number.

    Raises:
        TaskError: the hook failed, or gave no number.
    """
    try:
        return float(hook(batch))
    except Exception as error:
        raise TaskError(
            f"loss_weight(batch) raised {type(error).__name__}: {error}",
            hint="it gets one microbatch, or a batch of eval_data(), and returns a number, such as how many tokens are "
            "not padded",
        ) from error


class LossWeights:
    """Weighs the batches of `eval_data()`: by the user's hook where there is one, else by their samples.

    The samples of a batch are the size of its first tensor where training cuts the tensor of that name into
    microbatches, else its first dimension; a batch without such a tensor counts as one sample.
    """

    def __init__(self, plan: Plan, loss_weight: LossWeight | None) -> None:
        self._dims = {leaf.name: leaf.dim for leaf in plan.given if leaf.tensor is not None}
        self._loss_weight, self._padding = loss_weight, plan.padding

    def __call__(self, batch: Any) -> float:
        """A number of 0 or more: what the hook gives for the padded batch, or the samples of the batch as it is.

        Raises:
            TaskError: the hook failed, or gave what is no weight.
        """
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
    """The mean of every metric over some batches, summed in their order.

    Args:
        rows: of each batch, its weight and its metrics. Those of a batch of weight 0 are not read: they may be NaN.

    Raises:
        TaskError: the batches weigh nothing.
    """
    totals: dict[str, float] = {}
    whole = 0.0
    for weight, metrics in rows:
        whole += weight
        for name, value in metrics.items() if weight else ():
            totals[name] = totals.get(name, 0.0) + weight * value
    if not whole:
        raise TaskError(
            "the batches of eval_data() weigh nothing: all have loss_weight(batch) 0, or no samples",
            hint="evaluate on batches that count",
        )
    return {name: total / whole for name, total in totals.items()}
