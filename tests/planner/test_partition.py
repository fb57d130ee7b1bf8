"""The planner against brute force: equal objective, always."""

from __future__ import annotations

import dataclasses
import math

import naive_planner as naive
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CutError
from fxpipe.planner.links import Links
from fxpipe.planner.partition import Partition, partition
from fxpipe.planner.profile import Profile, Unit, Value, backward_values
from fxpipe.planner.worker_cost import Workers
from fxpipe.schedule import make
from fxpipe.simulator.of_partition import scenario_of_partition
from fxpipe.simulator.simulate import simulate

SMALL = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0, 7.0])


@st.composite
def profiles(draw: st.DrawFn, most: int = 5) -> Profile:
    count = draw(st.integers(1, most))
    units = []
    for i in range(count):
        saved = draw(SMALL)
        units.append(
            Unit(
                f"u{i}",
                draw(SMALL),
                draw(SMALL),
                draw(SMALL),
                draw(st.sampled_from([0.0, 1.0])),
                output_bytes=draw(SMALL),
                gradient_bytes=draw(SMALL),
                saved_bytes=saved,
                weight_saved_bytes=draw(st.sampled_from([0.0, saved])),
                fixed_bytes=draw(st.sampled_from([0.0, saved / 2])),
                parameter_bytes=draw(SMALL),
                frozen_bytes=draw(SMALL),
                temporary_bytes=draw(SMALL),
            )
        )
    values = []
    for i in range(count - 1):
        readers = draw(st.sets(st.integers(i + 1, count - 1), min_size=0, max_size=2))
        if readers:
            values.append(Value(i, units[i].output_bytes, tuple(sorted(readers))))
    uncut = {1: "u1"} if count > 2 and draw(st.booleans()) else {}
    return Profile(tuple(units), tuple(values), backward_values(units, values), uncut)


@st.composite
def settings_of_workers(draw: st.DrawFn, most: int = 3) -> Workers:
    count = draw(st.integers(1, most))
    rate = st.sampled_from([250.0, 1000.0, 8000.0])
    if draw(st.booleans()):
        bandwidth: object = draw(rate)
        latency: object = draw(st.sampled_from([0.0, 0.001]))
    else:
        bandwidth = tuple(tuple(draw(rate) for _ in range(count)) for _ in range(count))
        latency = tuple(tuple(draw(st.sampled_from([0.0, 0.002])) for _ in range(count)) for _ in range(count))
    links = draw(st.sampled_from([Links(), Links(bandwidth, latency, draw(st.sampled_from([0.0, 0.0005])))]))  # type: ignore[arg-type]
    return Workers(
        count,
        speeds=tuple(draw(st.sampled_from([1.0, 0.5, 2.0])) for _ in range(count)),
        memory=tuple(draw(st.sampled_from([10.0, 30.0, 60.0, math.inf])) for _ in range(count)),
        links=links,
        microbatches=draw(st.sampled_from([1, 4])),
    )


def check_against_brute_force(profile: Profile, workers: Workers, mode: str) -> None:
    expected = naive.best(profile, workers, mode)
    if math.isinf(expected):
        with pytest.raises(CutError, match="fits into memory"):
            partition(profile, workers, mode)
        return
    found = partition(profile, workers, mode)
    assert found.bottleneck_ms == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert found.exact
    check_consistent(found, profile, workers)


def check_consistent(found: Partition, profile: Profile, workers: Workers) -> None:
    """The plan that is handed out has the cost that it claims."""
    plan = (found.forward, found.backward, found.weights)
    assert plan in set(naive.every_plan(profile, workers, found.mode))
    claimed = [load.total for load in found.loads]
    choices = [naive.costs(profile, workers, *plan, choice) for choice in naive.every_choice(workers)]
    assert any(claimed == pytest.approx(costs, rel=1e-7, abs=1e-9) for costs in choices)
    assert max(claimed) == pytest.approx(found.bottleneck_ms, rel=1e-7, abs=1e-9)


@settings(max_examples=300, deadline=None)
@given(profiles(), settings_of_workers())
def test_shared_cuts_equal_brute_force(profile: Profile, workers: Workers) -> None:
    check_against_brute_force(profile, workers, "same")


@settings(max_examples=300, deadline=None)
@given(profiles(), settings_of_workers())
def test_independent_cuts_equal_brute_force(profile: Profile, workers: Workers) -> None:
    check_against_brute_force(profile, workers, "bidirectional")


@settings(max_examples=200, deadline=None)
@given(profiles(4), settings_of_workers())
def test_three_way_cuts_equal_brute_force(profile: Profile, workers: Workers) -> None:
    check_against_brute_force(profile, workers, "three-way")


def simulated_over_planned(profile: Profile, workers: Workers, mode: str) -> float:
    links = Links(workers.links.bandwidth_of(0, 0), workers.links.latency_of(0, 0), workers.links.copy)
    workers = dataclasses.replace(workers, memory=(), microbatches=1, links=links)
    found = partition(profile, workers, mode)
    schedule = make("async", workers.count, 1)
    simulated = simulate(schedule, scenario_of_partition(profile, found, workers, schedule), 12 * workers.count)
    seconds = simulated.seconds_per_minibatch
    return 1e3 * seconds / found.bottleneck_ms if found.bottleneck_ms else float(seconds > 1e-12)


@settings(max_examples=200, deadline=None)
@given(profiles(6), settings_of_workers(2), st.sampled_from(["same", "bidirectional", "three-way"]))
def test_a_run_keeps_what_the_plan_promises(profile: Profile, workers: Workers, mode: str) -> None:
    """The model bounds what the schedule does: simulated message by message, no run is slower than its plan."""
    assert simulated_over_planned(profile, workers, mode) <= 1 + 1e-6


@settings(max_examples=200, deadline=None, derandomize=True)
@given(profiles(6), settings_of_workers(4), st.sampled_from(["same", "bidirectional", "three-way"]))
def test_what_travels_past_a_neighbour_may_take_a_little_longer(profile: Profile, workers: Workers, mode: str) -> None:
    assert simulated_over_planned(profile, workers, mode) <= 1.15
