"""Saved values that are computed again: what that saves, what is said of it, and whose weights they are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured, cuts, lowered
from pipelines import optimizer
from small_models import CASES
from torch import Tensor, nn

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import FxpipeError
from fxpipe.lowering.new_shape import with_new_shape
from fxpipe.lowering.shapes import again_like
from fxpipe.plan.spec import PHASES
from fxpipe.planner.partition import TooLittleMemory
from fxpipe.policy.recipe import choose
from fxpipe.task.step_hooks import StepHooks


def again(build: Build) -> int:
    """How many values are computed again."""
    return sum(len(stage.again) for stage in build.plan.stages)


@pytest.mark.parametrize(
    ("name", "policy"),
    [("gpt", "vertical"), ("lstm", "spectrain+ef")],
)
def test_under_async_backward_reads_what_its_policy_gives_it(name: str, policy: str) -> None:
    """What it computes again has the versions of all that it reads."""
    build = lowered(name, 2, workers=3, policy=policy, recompute="full", **cuts(CASES[name], 3, 0))
    demand = choose(build.plan, "async", policy).demand
    lags: dict[tuple[int, str], set[tuple[int, ...]]] = {}
    for worker in range(3):
        for phase in PHASES[1:]:
            for reading in demand.readings(worker, phase):
                for parameter in reading.names:
                    lags.setdefault((worker, parameter), set()).add(tuple(reading.lags))
    assert all(len(found) == 1 for found in lags.values())


def test_a_plan_fits_because_of_it() -> None:
    """The planner refuses without it, and finds cuts with it, whose workers fit."""
    options: dict[str, Any] = {"workers": 2, "schedule": "gpipe", "cuts": "same"}
    free = lowered("gpt", 8, size=32, **options)
    needed = [load.memory for load in free.costs.partitions[-1].loads]
    memory = [0.7 * max(needed)] * 2
    with pytest.raises(TooLittleMemory) as refused:
        lowered("gpt", 8, size=32, memory=memory, recompute="none", **options)
    assert "--recompute auto" in str(refused.value.hint)
    build = lowered("gpt", 8, size=32, memory=memory, **options)
    loads = build.costs.partitions[-1].loads
    assert all(load.memory <= memory[0] for load in loads)
    assert again(build)
    for row, load in zip(build.workers, loads, strict=True):
        assert 8 * row.saved_bytes <= memory[0] - (load.memory - load.values)
        assert row.again <= 1.2 * load.recompute + 1e-9


def test_it_is_in_the_code_once_and_said() -> None:
    build = lowered("function", 2, workers=2, schedule="zb-h1", recompute="full", **cuts(CASES["function"], 2, 0))
    source = build.files["stage_0.py"]
    row, stage = build.workers[0], build.plan.stages[0]
    assert f"again     {len(stage.again)} values of its own forward, to save {row.spared_bytes:,} bytes" in source
    forward, later = source.split("def backward")
    backward, weights = later.split("def weights")
    assert "# again, to save memory: " in backward
    for name in stage.again:
        made = [line for line in source.splitlines() if line.strip().startswith(f"{name}_again = ")]
        assert len(made) <= 1, "once, in whichever comes first"
    assert "_again = " not in forward
    assert any(f" {name}_again" in weights for name in stage.again), "handed through"


def test_batches_of_another_shape_compute_the_same_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.3))
    batches = [torch.randn(4, length, 4) for length in (3, 5, 3, 5)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    options: dict[str, Any] = {
        **{"workers": 2, "schedule": "1f1b", "microbatches": 2, "cost": "analytic", "forward_at": ["2"]},
    }
    plain = fxpipe.compile(model, loss, batches[0], **options, shapes=batches[1:2])
    both = fxpipe.compile(model, loss, batches[0], **options, shapes=batches[1:2], recompute="full")
    for plan in both.plan.of_shapes:
        assert [stage.again for stage in plan.stages] == [stage.again for stage in both.plan.stages]
        assert all(stage.again for stage in plan.stages)
    saved = [[len(stage.forward.saved) for stage in plan.stages] for plan in both.plan.of_shapes]
    assert saved[0] == saved[1]
    first = fxpipe.compile(model, loss, batches[0], **options, recompute="full")
    later = with_new_shape(first, batches[1], StepHooks(lambda: model, loss, same=True))
    for one, other in zip(later.plan.steps[1].stages, both.plan.steps[1].stages, strict=True):
        assert (one.again, one.parts) == (other.again, other.parts)
    loaded = fxpipe.load(both.save(tmp_path / "build").folder)
    losses = [build.local(optimizer=optimizer).run(batches) for build in (plain, both, loaded, later)]
    assert losses[1:] == [losses[0]] * 3


def test_a_wrong_level_is_refused() -> None:
    with pytest.raises(FxpipeError, match="recompute='some' is not one of none, auto, full"):
        lowered("gpt", recompute="some")


def test_names_that_a_shape_does_not_have_are_left_out() -> None:
    """A plan may name what the step of another shape has not."""
    build = lowered("gpt", 2, schedule="1f1b", recompute="full", **cuts(CASES["gpt"], 2, 0))
    stages = tuple(replace(stage, again=("not_there", *stage.again)) for stage in build.plan.stages)
    found = again_like(build.plan.with_step(stages=stages), captured("gpt", 2)[2])
    assert all("not_there" not in names for names in found)
    assert any(found)
