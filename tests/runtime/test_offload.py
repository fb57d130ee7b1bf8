"""Saved values that wait in the CPU's memory: the same values, views of the same memory; refused without a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured, cuts, lowered
from pipelines import optimizer
from small_models import CASES

from fxpipe.builds.build import Build
from fxpipe.errors import RunError
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.offload import Away, Offload
from fxpipe.schedule.action import Action


def test_values_come_back_as_views_of_one_memory() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    small, text = torch.ones(1), "not a tensor"
    values = [x, x.t(), x[1:, 2:4], x.expand(2, 4, 6), x.view(torch.int32), torch.ones(3, 4).bool(), small, text]
    offload = Offload("cpu", least=8)
    away = offload.away(values)
    assert len(away.kept) == 2, "one of x, one of the mask"
    x_before, x = x.clone(), x.zero_()
    back = offload.back(away)
    assert back[-2] is small
    assert back[-1] is text
    for found, value in zip(back[:6], values[:6], strict=True):
        assert (found.shape, found.stride(), found.dtype) == (value.shape, value.stride(), value.dtype)
    assert torch.equal(back[0], x_before)
    assert len({value.untyped_storage().data_ptr() for value in back[:5]}) == 1
    assert not away.kept
    assert not away.back


def offloading(build: Build, **options: Any) -> tuple[Any, list[int]]:
    """A pipeline whose workers offload, as on a device, and how many microbatches each had away at once."""
    pipeline = build.local(optimizer=optimizer, **options)
    most = [0] * build.plan.workers
    for executor in pipeline.executors:
        executor.saved = saved = Offload("cpu", least=1)
        run = executor.execute

        def watched(
            action: Action, leaves: Any = None, executor: Executor = executor, saved: Offload = saved, run: Any = run
        ) -> Any:
            result = run(action, leaves)
            away = sum(isinstance(values, Away) for values, _ in saved._left.values())
            most[executor.worker] = max(most[executor.worker], away)
            return result

        executor.execute = watched  # type: ignore[method-assign]
    return pipeline, most


@pytest.mark.parametrize(("schedule", "recompute"), [("gpipe", "none"), ("1f1b", "full"), ("zb-h1", "none")])
def test_training_has_the_same_bits(schedule: str, recompute: str) -> None:
    where = cuts(CASES["gpt-dropout"], 3, 1)
    build = lowered("gpt-dropout", 4, workers=3, schedule=schedule, recompute=recompute, **where)
    batches = captured("gpt-dropout", 4)[0].batches(3)
    pipeline, most = offloading(build)
    assert pipeline.run(batches) == build.local(optimizer=optimizer).run(batches)
    assert most[0] == (4 if schedule == "gpipe" else 3)


def test_what_is_next_comes_back_during_the_action_before() -> None:
    """And what its own backward follows never leaves."""
    offload, saved = Offload("cpu", least=1), [torch.ones(4)]
    first, second, third = Action("F", 0, 0), Action("F", 0, 1), Action("F", 0, 2)
    offload.next_actions.extend([Action("B", 0, 0), second])
    offload.put(first, saved, set())
    assert offload.take(first)[0] is saved, "its backward is next"
    offload.next_actions.clear()
    offload.next_actions.extend([second, third, Action("B", 0, 0)])
    offload.put(first, saved, set())
    away: Any = offload._left[0, 0][0]
    assert isinstance(away, Away)
    offload.begins(second)
    assert not away.back, "a forward is next"
    offload.begins(third)
    assert len(away.back) == 1


def test_a_build_for_the_cpu_is_refused(tmp_path: Path) -> None:
    build = lowered("gpt", workers=2, **cuts(CASES["gpt"], 2, 0))
    with pytest.raises(RunError, match="from a CUDA device to the CPU's memory") as refused:
        build.local(optimizer=optimizer, offload=True)
    assert "leave it out" in str(refused.value.hint)
