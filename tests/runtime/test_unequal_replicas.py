"""Workers with different numbers of replicas train as one pipeline does."""

from __future__ import annotations

from math import lcm
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe as fxp
from fxpipe.errors import CutError, FxpipeError, PolicyError, ScheduleError

STEPS = 3


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(12) % 3
    return [(torch.randn(12, 6, generator=generator), labels) for _ in range(STEPS)]


def build_of(counts: list[int], schedule: str, times: int = 1, **more: Any) -> fxp.Build:
    return fxp.compile(
        net(),
        loss,
        batches()[0],
        schedule=schedule,
        cost="analytic",
        **{
            "workers": len(counts),
            "replicas": tuple(counts),
            "microbatches": times * lcm(*counts),
            "forward_at": ["2", "4"][: len(counts) - 1],
            **more,
        },
    )


def test_replicas_stay_equal() -> None:
    """Two runs of a build; in each, all replicas of a worker have the same weights, bit for bit."""
    build = build_of([2, 1, 1], "async", policy="stash")
    first = build.local(optimizer=sgd)
    second = build.local(optimizer=sgd)
    assert first.run(batches()) == second.run(batches())
    assert all(e.store.version == STEPS for e in first.every)
    for executor in first.every:
        twin = first.executors[executor.worker]
        for name, value in executor.store.parameters.items():
            assert torch.equal(value, twin.store.parameters[name])


def test_what_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(CutError, match="all workers have 2 replicas") as refused:
        build_of([2, 2], "1f1b")
    assert "--dp 2" in str(refused.value.hint)
    with pytest.raises(CutError, match="2,1 are the replicas of 2 workers, there are 3"):
        build_of([2, 1], "1f1b", workers=3)
    with pytest.raises(ScheduleError, match="5 microbatches cannot be shared by 2, 1 replicas"):
        build_of([2, 1], "1f1b", microbatches=5)
    with pytest.raises(CutError, match="for workers with equal numbers of replicas, not 2,1"):
        build_of([2, 1], "1f1b", shard="optimizer")
    for schedule, needed in (("zb-h1", "the same number of replicas"), ("auto", "equally many replicas")):
        with pytest.raises(ScheduleError, match=needed):
            build_of([2, 1], schedule)
    with pytest.raises(PolicyError, match="follows a microbatch through one pipeline"):
        build_of([2, 1], "async", policy="vertical")
    with pytest.raises(FxpipeError, match="reads weights of worker"):
        build_of([2, 1], "async", forward_at=["2"], backward_at=["4"], policy="stash")
