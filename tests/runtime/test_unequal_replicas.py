"""Which builds cannot have different numbers of replicas; what they train is in tests/law (replicas=2,1)."""

from __future__ import annotations

from math import lcm
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe as fxp
from fxpipe.errors import CutError, FxpipeError, PolicyError, ScheduleError


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def build_of(counts: list[int], schedule: str, **more: Any) -> fxp.Build:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    asked = {"workers": len(counts), "replicas": tuple(counts), "microbatches": lcm(*counts), "cost": "analytic"}
    asked |= {"schedule": schedule, "forward_at": ["2", "4"][: len(counts) - 1], **more}
    return fxp.compile(net, loss, (torch.randn(12, 6), torch.arange(12) % 3), **asked)


def test_what_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(CutError, match="all workers have 2 replicas") as refused:
        build_of([2, 2], "1f1b")
    assert "--dp 2" in str(refused.value.hint)
    with pytest.raises(FxpipeError, match="'2,0' is not a number of processes for each worker"):
        build_of([2, 0], "1f1b", microbatches=2)
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
