"""Several workers in one process: which schedules fit them, tables of one's own, and the bits of 1F1B without it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cached import captured, cuts, lowered
from pipelines import optimizer
from small_models import CASES

import fxpipe
from fxpipe.errors import ScheduleError
from fxpipe.plan import consistency
from fxpipe.schedule import make, schedule_text, to_csv
from fxpipe.typed_json import Malformed


@functools.cache
def v_shaped() -> fxpipe.Build:
    return lowered("gpt-dropout", 4, workers=2, schedule="zb-v", **cuts(CASES["gpt-dropout"], 4, 1))


@functools.cache
def one_each() -> fxpipe.Build:
    return lowered("gpt-dropout", 4, workers=2, schedule="zb-h1", **cuts(CASES["gpt-dropout"], 2, 1))


def trained(build: fxpipe.Build, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses of some steps, and the state after them."""
    pipeline = build.local(optimizer=optimizer, **options)
    losses = [float(pipeline.step(batch)) for batch in captured("gpt-dropout", 4)[0].batches(3)]
    pipeline.flush()
    return losses, {name: tensor.tolist() for name, tensor in pipeline.state_dict().items()}


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    """A plan has its rows; a run can have other ones for the same workers."""
    where = cuts(CASES["gpt-dropout"], 4, 1)
    text = to_csv(make("zb-v", 4, 4))
    path = tmp_path / "own.csv"
    path.write_text(text)
    build = lowered("gpt-dropout", 4, workers=2, schedule=str(path), **where)
    assert (build.plan.schedule, build.plan.placement) == ("csv", (0, 1, 1, 0))
    assert "\n".join(build.plan.rows) + "\n" == text
    assert build.plan.weights_apart
    build.save(tmp_path / "build")
    loaded = fxpipe.load(tmp_path / "build")
    assert (loaded.plan.rows, loaded.plan.placement) == (build.plan.rows, build.plan.placement)
    named = v_shaped()
    assert schedule_text("csv") == "csv"  # a build's own, as inspect names it
    assert trained(loaded, schedule="csv") == trained(loaded)
    with pytest.raises(ScheduleError, match="there is no schedule 'csv'"):
        trained(named, schedule="csv")
    assert trained(loaded) == trained(named) == trained(named, schedule=str(path)) == trained(loaded, schedule="v-min")


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        ("0F0,0B0\n1F0,1B0", "for 2 stages, the build has 4"),
        ("0F0,0B0", "for 1 ranks, the build has 2"),
        (to_csv(make("zb-v", 4, 2)), "for 2 microbatches, the build has 4"),
        (to_csv(make("interleaved", 4, 4)), r"on ranks \[0, 1, 0, 1\], the build has them on \[0, 1, 1, 0\]"),
        ("interleaved", "not on"),
        ("async", "has one worker on each rank"),
    ],
)
def test_a_schedule_that_is_not_for_these_workers(schedule: str, what: str) -> None:
    build = v_shaped()
    with pytest.raises(ScheduleError, match=what):
        build.local(optimizer=optimizer, schedule=schedule)


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "dualpipev"])
def test_stages_with_a_process_each_do_not_run_as_a_v(schedule: str) -> None:
    """They are not taken to be two of a process, as such a schedule would have them."""
    build = one_each()
    with pytest.raises(ScheduleError, match=r"has its workers on ranks 0, 1, …, 1, 0, not on \[0, 1\]"):
        build.local(optimizer=optimizer, schedule=schedule)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"schedule": "async", "virtual": 2}, "one worker on each rank, not 2"),
        ({"schedule": "zb-v", "virtual": 3}, "2 workers on each rank, not 3"),
        ({"schedule": to_csv(make("zb-v", 6, 4))}, "for 3 ranks, not 2"),
        ({"schedule": to_csv(make("zb-v", 4, 2))}, "for 2 microbatches, not 4"),
        ({"schedule": to_csv(make("zb-v", 4, 4)), "virtual": 2}, "itself says how many stages"),
        ({"schedule": "no.csv"}, "cannot be read"),
    ],
)
def test_what_cannot_be_compiled(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ScheduleError, match=what):
        lowered("gpt-dropout", 4, workers=2, **options)


def test_a_plan_with_a_wrong_placement_is_refused() -> None:
    build = v_shaped()
    for placement in ((1, 0, 0, 1), (0, 1, 1), (0, 2, 2, 0), (0, 1, 2, 3)):
        with pytest.raises(Malformed, match="cannot run on ranks"):
            consistency.check(replace(build.plan, placement=placement))


def test_the_planner_shares_what_a_process_has() -> None:
    """Two workers of a process share its memory, half of it by what they hold, and have its links and its speed."""
    from fxpipe.lowering.option_rules import setting_of
    from fxpipe.lowering.options import CompileOptions
    from fxpipe.planner.links import Links

    options = CompileOptions(
        workers=2,
        schedule="zb-v",
        microbatches=4,
        memory=(100.0, 60.0),
        speeds=(1.0, 0.5),
        links=Links(((9.0, 1.0), (2.0, 9.0)), 0.25, 0.0),
    )
    workers = setting_of(options).workers(options.stages)
    assert workers.in_flight == (3, 2, 2, 1)
    assert workers.memory == pytest.approx((62.5, 30, 30, 37.5))
    assert workers.speeds == (1, 0.5, 0.5, 1)
    assert [workers.links.bandwidth_of(a, b) for a, b in ((0, 1), (1, 2), (2, 3), (3, 2), (1, 0))] == [
        *(1, float("inf"), 2, 1, 2)
    ]
    assert [workers.links.latency_of(a, b) for a, b in ((0, 1), (1, 2), (0, 3))] == [0.25, 0, 0]
