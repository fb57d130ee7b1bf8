"""How many microbatches a compile takes where nothing is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import towers
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import BatchError

Batch = tuple[Tensor, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))


def batch(samples: int) -> Batch:
    torch.manual_seed(1)
    return torch.randn(samples, 6), torch.randn(samples, 6)


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0]) @ batch[1].T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def built(loss: Callable[[nn.Module, Any], Tensor], samples: int, **options: Any) -> fxpipe.Build:
    return fxpipe.compile(net(), loss, batch(samples), **{"workers": 4, "cost": "analytic", **options})


def about_microbatches(made: fxpipe.Build) -> list[str]:
    return [warning for warning in made.warnings if "microbatch" in warning]


@pytest.mark.parametrize(("workers", "samples", "expected"), [(1, 8, 1), (2, 8, 1), (3, 8, 4), (4, 8, 4), (4, 6, 3)])
def test_about_as_many_as_workers(workers: int, samples: int, expected: int) -> None:
    made = built(squared, samples, workers=workers)
    assert made.plan.microbatches == expected
    assert not about_microbatches(made)


def test_what_is_asked_is_taken() -> None:
    assert built(squared, 8, microbatches=2).plan.microbatches == 2
    assert built(squared, 8, schedule="1f1b", workers=3).plan.microbatches == 4


def test_a_loss_that_is_not_one_of_microbatches_has_one() -> None:
    made = built(contrastive, 8)
    assert made.plan.microbatches == 1
    (warning,) = about_microbatches(made)
    assert warning.startswith(
        "the batch stays whole, so that forwards miss up to 3 updates; 4 microbatches are not possible: "
    )
    assert "spectrain lost 6% to 8% of the synchronous result where forwards missed 3 (benchmarks/accuracy)" in warning
    with pytest.raises(BatchError):
        built(contrastive, 8, microbatches=4)
    with pytest.raises(BatchError):  # a pipeline that is flushed would stand still
        built(contrastive, 8, schedule="1f1b")


def test_a_batch_that_cannot_be_cut_is_one_microbatch() -> None:
    made = fxpipe.compile(
        net(), lambda model, x: model(x.expand(6)).square().sum(), torch.tensor(2.0), workers=4, cost="analytic"
    )
    assert made.plan.microbatches == 1
    (warning,) = about_microbatches(made)
    assert "several microbatches are not possible: a batch of scalars cannot be split" in warning


@pytest.mark.parametrize(
    ("workers", "samples", "missed", "studied"), [(4, 31, 3, 3), (4, 2, 2, 2), (9, 7, 2, 2), (9, 2, 4, 7)]
)
def test_a_batch_too_small_for_so_many_says_what_that_costs(
    workers: int, samples: int, missed: int, studied: int
) -> None:
    (warning,) = about_microbatches(built(squared, samples, workers=workers))
    assert f"so that forwards miss up to {missed} updates; " in warning
    assert f"its samples cannot be cut into about {workers} equal microbatches; " in warning
    assert f"where forwards missed {studied} (benchmarks/accuracy); " in warning
    assert warning.endswith(f"with a batch size that is a multiple of {workers}, they miss 1")


def towers_built(cuts: Sequence[str], samples: int, **options: Any) -> list[str]:
    options = {"workers": len(cuts) + 1, "forward_at": cuts, "cost": "analytic"} | options
    return about_microbatches(fxpipe.compile(towers.Towers(), towers.loss, towers.batch_of(samples), **options))


def test_branches_side_by_side_miss_fewer_updates() -> None:
    (warning,) = towers_built(towers.CUTS[1:4], 31)
    assert "so that forwards miss up to 2 updates; " in warning
    assert "where forwards missed 2 (benchmarks/accuracy); " in warning
    assert not towers_built(towers.CUTS[2:5:2], 31), "they miss 1, as with more microbatches"


def test_branches_side_by_side_are_idle_for_less_time() -> None:
    (warning,) = towers_built(towers.CUTS[1:4], 25, schedule="1f1b", last=towers.batch_of(4))
    assert "workers idle about 67% of the time; 5 microbatches would leave 29%, but " in warning


def test_what_is_asked_is_not_warned_of() -> None:
    assert not about_microbatches(built(squared, 8, microbatches=1))


def test_batches_of_every_shape_can_be_cut_into_them() -> None:
    made = fxpipe.compile(net(), squared, batch(8), workers=4, cost="analytic", shapes=[batch(6)])
    assert made.plan.microbatches == 2
    assert len(made.plan.of_shapes) == 2


def test_a_step_that_fails_says_why() -> None:
    with pytest.raises(fxpipe.errors.FxpipeError, match="lable"):
        built(lambda model, batch: model(batch["lable"]).sum(), 8)
