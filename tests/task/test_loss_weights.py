"""What batches count in an evaluation, and the means that come of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import TaskError
from fxpipe.plan.plan import Plan
from fxpipe.task.loss_weights import LossWeights, weight_of, weighted_means


def plan_of(batch: Any, **options: Any) -> Plan:
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[-1]).square().mean()

    settings = {"workers": 1, "schedule": "1f1b", "microbatches": 2, "cost": "analytic"}
    return fxpipe.compile(nn.Linear(3, 3), loss, batch, **{**settings, **options}).plan


@pytest.mark.parametrize(
    ("dims", "batch", "weight"),
    [
        ((None, 0), (torch.ones(3), torch.ones(5, 3)), 5),
        ((None, 1), (torch.ones(3), torch.ones(4, 6, 3)), 6),
        ((None, 1), {"x": torch.ones(7, 3)}, 7),
        ((None, 1), (2.0, torch.tensor(1.0)), 1),
    ],
)
def test_samples_are_where_training_cuts(dims: Any, batch: Any, weight: int) -> None:
    example = (torch.ones(3), torch.randn(4, 2, 3) if dims[1] else torch.randn(4, 3))
    weigh = LossWeights(plan_of(example, microbatch_dims=dims), None)
    assert weigh(batch) == weight


def test_the_hook_weighs_where_there_is_one() -> None:
    plan = plan_of((torch.randn(4, 3),))
    assert LossWeights(plan, lambda batch: batch[0].sum())((torch.full((2, 3), 0.5),)) == 3.0
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(TaskError, match=r"gave \S+ for a batch of eval_data"):
            LossWeights(plan, lambda batch: wrong)((torch.ones(2, 3),))  # noqa: B023
    with pytest.raises(TaskError, match=r"loss_weight\(batch\) raised KeyError: 'y'") as caught:
        weight_of(lambda batch: batch["y"], {})
    assert "eval_data()" in str(caught.value.hint)


def test_what_counts_nothing_is_not_read() -> None:
    rows = [(3.0, {"a": 1.0, "b": 2.0}), (0.0, {"a": math.nan, "b": math.inf}), (1.0, {"a": 5.0, "b": 2.0})]
    assert weighted_means(rows) == {"a": 2.0, "b": 2.0}
    with pytest.raises(TaskError, match="have weight 0"):
        weighted_means([(0.0, {"a": 1.0})])
