"""Forecasts charge what a backward does not hide of the sums over replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cached import captured

import fxpipe
from fxpipe.codecs.packs import outer_message
from fxpipe.plan.cost_records import StageTime
from fxpipe.plan.mesh import OuterSpec
from fxpipe.planner.links import Links
from fxpipe.planner.partition import TooLittleMemory
from fxpipe.policy.recipe import choose
from fxpipe.schedule import make
from fxpipe.simulator.memory import peak_bytes
from fxpipe.simulator.of_build import exposed_sums, forecast, late_instead
from fxpipe.simulator.scenario import Scenario
from fxpipe.simulator.simulate import simulate


def built(dp: int) -> fxpipe.Build:
    return fxpipe.lower(captured("gpt", 2, size=12)[2], workers=1, dp=dp, microbatches=2 // dp, cost="analytic")


def test_a_worker_without_replicas_waits_for_none() -> None:
    assert exposed_sums(built(1).plan, 0, Links(1e6, 1.0), 0.0) == (0, 0)


def test_what_the_backward_does_not_hide_is_waited_for() -> None:
    plan = built(2).plan
    (bucket,) = plan.stages[0].buckets
    size, links = bucket.bytes, Links(1e6, 0.25)
    whole = size / 1e6 + 0.5  # 2 (R - 1) / R is 1
    assert exposed_sums(plan, 0, links, backward=0.0)[0] == pytest.approx(whole)
    assert exposed_sums(plan, 0, links, backward=99.0)[0] == pytest.approx(whole)  # the last bucket comes at its end
    three = replace(plan.stages[0], buckets=(replace(bucket, name="a"), replace(bucket, name="b"), bucket))
    three_of = plan.with_step(stages=(three,))
    assert exposed_sums(three_of, 0, links, backward=0.0)[0] == pytest.approx(3 * whole)
    assert exposed_sums(three_of, 0, links, backward=1.5 * whole)[0] == pytest.approx(1.5 * whole)
    assert exposed_sums(three_of, 0, links, backward=99.0)[0] == pytest.approx(whole)


def test_a_late_update_hides_them_behind_a_minibatch() -> None:
    for sums, plainly, late in ((0.0, 4.0, 4.0), (2.0, 6.0, 4.0), (3.0, 7.0, 4.0), (5.0, 9.0, 5.0)):
        scenario = Scenario((StageTime(1.0, 2.0, 1.0),), sums=(sums,))
        for name, expected in (("async", plainly), ("async-late", late)):
            found = simulate(make(name, 1), scenario, 24)
            assert found.seconds_per_minibatch == expected
            assert sum(span.end - span.start for span in found.spans[0]) == 24 * 4.0


def test_a_forecast_says_when_late_updates_are_faster() -> None:
    program = captured("gpt", 2, size=12)[2]
    build = fxpipe.lower(program, workers=1, dp=2, microbatches=1, cost="analytic", schedule="async")
    compute = build.costs.time(0).forward + build.costs.time(0).backward
    slow = replace(build.costs, links=Links(build.plan.stages[0].buckets[0].bytes / compute))  # both take as long
    own = forecast(build.plan, slow)
    found = late_instead(build.plan, slow, own.seconds_per_minibatch)
    assert found == ("async-late", forecast(build.plan, slow, schedule="async-late").seconds_per_minibatch)
    assert found[1] == pytest.approx(own.seconds_per_minibatch / 2, rel=0.05)
    fast = replace(build.costs, links=Links(1e15))
    assert late_instead(build.plan, fast, forecast(build.plan, fast).seconds_per_minibatch) is None


def test_one_more_sum_of_gradients_is_held() -> None:
    program = captured("gpt", 2, size=12)[2]
    build = fxpipe.lower(program, workers=1, dp=2, microbatches=1, cost="analytic", schedule="async")
    gradients = sum(p.tensor.bytes for p in build.plan.parameters)
    peaks = [
        peak_bytes(build.plan, build.costs, choose(build.plan, name, "latest").demand)[0]
        for name in ("async", "async-late")
    ]
    assert peaks[1] == peaks[0] + gradients


def test_the_processors_copy_what_is_sent_and_received() -> None:
    plan = built(2).plan
    size = plan.stages[0].buckets[0].bytes
    assert exposed_sums(plan, 0, Links(), backward=0.0) == (0.0, pytest.approx(2 * size))


def apart(delay: int, **options: object) -> fxpipe.Build:
    program = captured("gpt", 2, size=12)[2]
    asked = {"outer": "diloco", "outer_every": 10, "outer_delay": delay, **options}
    return fxpipe.lower(program, workers=1, dp=2, microbatches=1, cost="analytic", **asked)


def test_replicas_that_train_apart_share_an_outer_step_out() -> None:
    plan, links = apart(0).plan, Links(1e6, 0.25)
    assert plan.outer == OuterSpec(10, 0.7, 0.9)
    trained = sum(p.tensor.bytes for p in plan.parameters)
    whole = trained / 1e6 + 0.5
    assert exposed_sums(plan, 0, links, backward=99.0, minibatch=99.0)[0] == pytest.approx(whole / 10)
    late = apart(1).plan
    assert exposed_sums(late, 0, links, 0.0, minibatch=whole / 20)[0] == pytest.approx(whole / 20)
    assert exposed_sums(late, 0, links, 0.0, minibatch=whole / 10)[0] == 0


def test_a_codec_sends_its_message_to_all_in_one_round() -> None:
    plan, links = apart(0, codec="outer=int8").plan, Links(1e6, 0.25)
    message = outer_message("int8", {p.name: p.tensor for p in plan.parameters if p.trained})
    whole = exposed_sums(plan, 0, links, backward=99.0, minibatch=99.0)
    assert whole == (pytest.approx((message.bytes / 1e6 + 0.25) / 10), 2 * message.bytes / 10)


def test_a_slow_link_costs_them_a_step_in_many() -> None:
    """The forecast of a build: less than with sums in every step, and nothing where a delay hides it."""
    links = Links(1e8, 1e-3)
    joint = fxpipe.lower(captured("gpt", 2, size=12)[2], workers=1, dp=2, microbatches=1, cost="analytic", links=links)
    builds = [joint, apart(0, links=links), apart(0, links=links, outer_every=10**6), apart(1, links=links)]
    seconds = [forecast(build.plan, build.costs).seconds_per_minibatch for build in builds]
    alone = seconds[2]
    assert seconds[1] - alone < 0.2 * (seconds[0] - alone)
    assert seconds[3] == pytest.approx(alone, rel=1e-4)
    assert seconds[3] < seconds[1]


def test_what_outer_steps_keep_is_counted() -> None:
    one = fxpipe.lower(captured("gpt", 2, size=12)[2], workers=1, microbatches=1, cost="analytic")
    trained = sum(p.tensor.bytes for p in one.plan.parameters)
    memory = [build.costs.workers[0].memory_bytes for build in (one, apart(0), apart(1))]
    assert memory[1] >= memory[0] + 2 * trained
    assert memory[2] == memory[1] + trained
    sparse = [apart(delay, codec="outer=sparseloco").costs.workers[0].memory_bytes for delay in (0, 1)]
    assert sparse == [memory[1], memory[1] + 2 * trained], "what is left out takes the momentum's place"


def least_room(**options: object) -> float:
    """The bytes that the planner says one worker with two replicas needs."""
    program = captured("gpt", 2, size=12)[2]
    asked = {"microbatches": 1, "cost": "analytic", "recompute": "none", "memory": (1000.0,)}
    with pytest.raises(TooLittleMemory) as refused:
        fxpipe.lower(program, workers=1, dp=2, policy="latest", **asked, **options)
    return 1000.0 * refused.value.share


def test_the_planner_finds_room_for_what_replicas_keep() -> None:
    """What outer steps keep; else the forecast finds the cuts it chooses too large."""
    trained = sum(p.tensor.bytes for p in built(2).plan.parameters)
    joint = least_room(schedule="async")
    outer, delayed = (least_room(schedule="async", outer="diloco", outer_delay=delay) for delay in (0, 1))
    assert outer == pytest.approx(joint + 2 * trained, abs=8)
    assert delayed == pytest.approx(outer + trained)
    assert least_room(schedule="async", shard="optimizer") == pytest.approx(joint - trained / 2, rel=0.05)
