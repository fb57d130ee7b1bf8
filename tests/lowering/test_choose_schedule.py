"""`schedule="auto"`: what compile takes, that the build is of it, and what it cannot be asked."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CutError, PolicyError, ScheduleError
from fxpipe.lowering.choose_schedule import counts_of
from fxpipe.lowering.options import CompileOptions
from fxpipe.planner.device import CPU
from fxpipe.planner.links import Links
from fxpipe.schedule import SCHEDULES
from fxpipe.search import Counts, schedules_of
from fxpipe.simulator.of_build import forecast
from fxpipe.task.batch import Batch


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def net(depth: int = 6, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def made(rows: int = 32, model: nn.Module | None = None, **asked: Any) -> Any:
    """A build of a net whose costs are computed, over links that cost little."""
    asked = {"workers": 2, "cost": "analytic", "links": Links(latency=1e-7), "device": CPU} | asked
    return fxpipe.compile(model or net(), loss, torch.randn(rows, 64), **asked)


@functools.cache
def roomy() -> Any:
    """Of all synchronous schedules and two, four and eight microbatches, where memory has no limit."""
    return made(schedule="auto", synchronous=True)


PLAIN: dict[str, Any] = {"cuts": "same", "virtual": 1, "recompute": "none"}
"""Less to search, where the search is not what is tested."""


def test_the_build_is_of_what_was_taken() -> None:
    build = roomy()
    best = build.costs.schedules[0]
    assert (build.plan.schedule, build.plan.policy, build.plan.microbatches) == (
        best.schedule,
        "latest",
        best.microbatches,
    )
    assert best.why == ""
    assert SCHEDULES[best.schedule].synchronous
    assert SCHEDULES[best.schedule].weights_apart == (build.plan.stages[0].weights is not None)
    assert {row.microbatches for row in build.costs.schedules} == {2, 4, 8}
    named = {n for n, kind in SCHEDULES.items() if kind.synchronous}
    assert {row.schedule for row in build.costs.schedules} == named
    refused, taken = build.costs.partitions  # cuts apart are not worth their messages
    assert (refused.mode, taken.mode) == ("bidirectional", best.cuts)
    assert taken.forward[1:-1] == tuple(s.forward_units[0] for s in build.plan.stages[1:])
    assert forecast(build.plan, build.costs).seconds_per_minibatch == pytest.approx(best.seconds, rel=0.1)


def test_synchronous_alone_means_auto() -> None:
    assert made(synchronous=True, **PLAIN).plan == made(schedule="auto", synchronous=True, **PLAIN).plan


def test_auto_considers_async_too() -> None:
    build = made(schedule="auto", microbatches=2)
    assert {row.schedule for row in build.costs.schedules} == set(schedules_of(False))
    assert {row.microbatches for row in build.costs.schedules} == {2}
    assert build.plan.schedule == "async"


def test_no_schedule_compiled_by_itself_is_faster() -> None:
    """By the forecast of the build itself, whose messages are known one by one."""
    auto = roomy()
    for name in SCHEDULES:
        if SCHEDULES[name].synchronous:
            fixed = made(schedule=name, microbatches=auto.plan.microbatches)
            assert forecast(auto.plan, auto.costs).seconds_per_minibatch <= 1.03 * (
                forecast(fixed.plan, fixed.costs).seconds_per_minibatch
            ), name


def test_further_shapes_have_stages_of_the_same_schedule() -> None:
    model = net()
    build = fxpipe.compile(
        model, loss, torch.randn(8, 64), shapes=[torch.randn(4, 64)], synchronous=True, cost="analytic", **PLAIN
    )
    assert len(build.of_shapes) == 2
    assert all(4 % row.microbatches == 0 for row in build.costs.schedules)
    assert build.plan.schedule == build.costs.schedules[0].schedule


def test_pinned_cuts_stay() -> None:
    build = made(schedule="auto", synchronous=True, microbatches=4, forward_at=["2"])
    assert {row.cuts for row in build.costs.schedules} == {"pinned"}
    first = build.plan.stages[1].forward_units[0]
    assert build.plan.step.units[first].startswith("2")


def test_memory_decides() -> None:
    limit = 1.02 * min(row.memory_bytes for row in roomy().costs.schedules if row.schedule == "1f1b")
    tight = made(synchronous=True, microbatches=8, memory=[limit] * 2, cuts="same", virtual=1)
    assert tight.costs.schedules[0].memory_bytes <= limit
    with pytest.raises(CutError, match="which needs least") as caught:
        made(synchronous=True, microbatches=8, memory=[1e4] * 2, cuts="same", virtual=1)
    assert "give every worker" in str(caught.value.hint)


def test_more_microbatches_where_memory_is_short() -> None:
    """A microbatch of fewer samples saves less; but a batch norm sees it by itself, and would train another model."""
    asked = {"rows": 512, "synchronous": True, **PLAIN}
    limit = 0.7 * min(row.memory_bytes for row in made(**asked, microbatches=8).costs.schedules)
    tight = made(**asked, memory=[limit] * 2)
    assert tight.plan.microbatches > 8
    assert tight.costs.schedules[0].memory_bytes <= limit
    assert {row.microbatches for row in tight.costs.schedules} >= {2, 4, 8, 16}
    torch.manual_seed(0)
    normed = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()) for _ in range(6)))
    with pytest.raises(CutError, match="with 8 microbatches, which needs least"):
        made(model=normed, **asked, memory=[limit] * 2)


def test_a_loss_of_microbatches_leaves_one() -> None:
    """A contrastive loss is not one of microbatches: only a single microbatch can be compiled."""

    def contrastive(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        return (out @ out.T).logsumexp(1).mean()

    build = fxpipe.compile(net(), contrastive, torch.randn(8, 64), synchronous=True, cost="analytic", **PLAIN)
    assert build.plan.microbatches == 1
    refused = {row.microbatches for row in build.costs.schedules if row.seconds is None}
    assert refused == {2, 4, 8}
    with pytest.raises(fxpipe.FxpipeError):
        fxpipe.compile(net(), contrastive, torch.randn(8, 64), synchronous=True, microbatches=4, cost="analytic")


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ScheduleError, match="'async' is not synchronous") as caught:
        made(schedule="async", synchronous=True)
    assert "leave out the schedule" in str(caught.value.hint)
    with pytest.raises(PolicyError, match="makes no sense"):
        made(policy="stash", synchronous=True)
    program = fxpipe.capture(net(), loss, torch.randn(8, 64))
    with pytest.raises(ScheduleError, match="this program was captured with one"):
        fxpipe.lower(program, schedule="auto")


def test_counts_divide_all_batches() -> None:
    options = CompileOptions(workers=2, schedule="auto", synchronous=True)
    assert counts_of(options, [Batch.of(torch.randn(n, 4)) for n in (32, 12)]) == Counts((2, 4), 4)
    assert counts_of(options, [Batch.of(torch.randn(7, 4))]) == Counts((7,), 7)
    assert counts_of(CompileOptions(workers=2, microbatches=4), [Batch.of(torch.randn(32, 4))]) == Counts((4,))
    assert counts_of(options, [Batch.of([torch.randn(8), torch.randn(6)])]) == Counts((1,))
