"""A run with discounted rates: neither schedulers nor metrics see the discount, and a flush leaves nothing to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pipelines import pipeline_of
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from fxpipe.errors import PolicyError


def test_schedulers_and_metrics_never_see_it(toy: Any, batches: Any, tmp_path: Path) -> None:
    folder = toy(forward=(0, 1, 2, 3), backward=(0, 1, 2, 3)).save(tmp_path / "build")
    used: list[float] = []

    def optimizer(named: Any) -> Optimizer:
        made = SGD([p for _, p in named], lr=0.1)
        made.register_step_pre_hook(lambda opt, *_: used.append(opt.param_groups[0]["lr"]))
        return made

    pipeline = pipeline_of(folder, optimizer, lambda o: ExponentialLR(o, 0.9), policy="stash", rate_discount=4)
    shown: list[float | None] = []
    pipeline.report = lambda minibatch, loss, lr, norm, metrics: shown.append(lr)
    pipeline.run(batches)
    plain = [0.1 * 0.9**t for t in range(len(batches))]
    assert shown == pytest.approx(plain)
    late = [lr * (3 - k) ** -max(0, 1 - t / 4) for k in range(3) for t, lr in enumerate(plain)]
    assert sorted(used) == pytest.approx(sorted([*late, *plain]))


def test_refused(toy: Any, tmp_path: Path) -> None:
    folder = toy().save(tmp_path / "build")
    for options, said in (
        ({"schedule": "1f1b", "rate_discount": 8}, "no gradient is late"),
        ({"schedule": "async", "rate_discount": 0}, "over 0 steps"),
    ):
        with pytest.raises(PolicyError, match=said):
            pipeline_of(folder, lambda named: SGD([p for _, p in named], lr=0.1), **options)
