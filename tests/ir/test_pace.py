"""No worker runs ahead of its neighbours, whatever it has to do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured, lowered
from pipelines import pipeline_of
from random_cuts import numbered, random_cuts
from strict_wires import run_in_threads
from torch import Tensor, nn

import fxpipe
from fxpipe.build.build import Build
from fxpipe.planner.cuts import Cuts


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.01, momentum=0.9)


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).requires_grad_(False)
        self.trained = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.frozen(x))


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def half_frozen(schedule: str, microbatches: int) -> tuple[nn.Module, Build]:
    torch.manual_seed(0)
    model = HalfFrozen()
    return model, fxpipe.compile(
        model, square, torch.randn(8, 6), workers=3, microbatches=microbatches, schedule=schedule, cost="analytic",
        forward_at=["frozen.2", "trained"],
    )  # fmt: skip


def nothing_in_the_middle() -> Build:
    count = len(numbered("function").units)
    return lowered("function", workers=3, cuts=Cuts((0, 5, 5, count), (0, 5, 5, count)))


BUILDS = {
    "half frozen": lambda: half_frozen("async", 1)[1],
    "nothing in the middle": nothing_in_the_middle,
    "everything on the first": lambda: lowered("function", workers=3, cuts=Cuts((0, 15, 15, 15), (0, 15, 15, 15))),
    "everything on the last": lambda: lowered("function", workers=3, cuts=Cuts((0, 0, 0, 15), (0, 0, 0, 15))),
    "backward the other way": lambda: lowered("function", workers=3, cuts=Cuts((0, 15, 15, 15), (0, 0, 0, 15))),
    **{f"random {s}": lambda s=s: lowered("unet", workers=4, cuts=random_cuts("unet", 4, s)) for s in range(1)},
}


@pytest.mark.parametrize("greedy", [None, 0, 1, 2])
@pytest.mark.parametrize("name", BUILDS)
def test_no_worker_runs_ahead_however_eager_it_is(name: str, greedy: int | None) -> None:
    """One worker acts whenever it can, or they act in a random order: the counts keep to the pipeline's order."""
    pipeline = BUILDS[name]().local(optimizer=optimizer)
    batch = torch.randn(8, 6) if name == "half frozen" else captured("unet" if "random" in name else "function")[0]
    batch = batch if isinstance(batch, Tensor) else batch.batches(1)[0]
    minibatches, workers = 6, pipeline.plan.workers
    pipeline.begin()
    for minibatch in range(minibatches):
        pipeline._shapes[minibatch], parts = pipeline._minibatches(batch, minibatch)
        for microbatch, leaves in enumerate(parts):
            pipeline._leaves[minibatch, microbatch] = leaves
    pipeline.fed, pipeline._ending = minibatches, True
    chance = random.Random(0)
    idle = 0
    while pipeline._in_flight:
        worker = chance.randrange(workers) if greedy is None or idle else greedy
        idle = 0 if pipeline._act(pipeline._seats[worker]) else idle + 1
        assert idle < 1000, "the pipeline stands still"
        forwards, backwards = ([executor.watch.count(kind) for executor in pipeline.executors] for kind in ("F", "B"))
        assert forwards == sorted(forwards, reverse=True)
        assert backwards == sorted(backwards)
        assert all(f - b <= workers - k for k, (f, b) in enumerate(zip(forwards, backwards, strict=True)))
    assert not [key for key in pipeline._mailboxes[0].letters if key[0] != "weights"]


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("name", BUILDS)
def test_threads_are_the_local_run(name: str, by_channel: bool, tmp_path: Path) -> None:
    build = BUILDS[name]()
    data = [torch.randn(8, 6) for _ in range(8)]
    if name != "half frozen":
        data = captured("unet" if "random" in name else "function")[0].batches(8)
    build.save(tmp_path / "build")
    run = run_in_threads(tmp_path / "build", data, optimizer, by_channel)
    pipeline = pipeline_of(tmp_path / "build", optimizer)
    run.check(pipeline.run(data), pipeline.state_dict())
