"""The planner against brute force: equal objective, always."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_plans import check_against_brute_force, partition, profiles, ratios, settings_of_workers

from fxpipe.planner.links import Links
from fxpipe.planner.profile import Profile, Unit, Value
from fxpipe.planner.workers import Workers
from fxpipe.schedule import make
from fxpipe.simulator.of_partition import scenario_of_partition
from fxpipe.simulator.simulate import simulate


@st.composite
def sparse_profiles(draw: st.DrawFn, most: int = 5) -> Profile:
    """Many units that cost nothing, so that cuts dominate each other, between some that save and move much."""
    count = draw(st.integers(2, most))
    units = []
    for i in range(count):
        saved = draw(st.sampled_from([0.0, 1.0, 500.0]))
        held = draw(st.sampled_from([0.0, 0.0, 0.0, 60.0]))
        if draw(st.booleans()):
            units.append(Unit(f"u{i}", 0.0, 0.0, frozen_bytes=held, saved_bytes=0.0))
        else:
            own = draw(st.sampled_from([0.0, saved]))
            times = [draw(st.sampled_from([0.0, 1.0, 5.0, 10.0])) for _ in range(3)]
            units.append(Unit(f"u{i}", *times, saved_bytes=saved, weight_saved_bytes=own, parameter_bytes=held))
    some = st.sampled_from([0.0, 2.0, 10.0, 50.0, 500.0])
    forward = [
        Value(i, draw(some), tuple(sorted(draw(st.sets(st.integers(i + 1, count - 1), min_size=1, max_size=2)))))
        for i in range(count - 1)
        if draw(st.booleans())
    ]
    backward = [Value(i, draw(some), (draw(st.integers(0, i - 1)),)) for i in range(1, count) if draw(st.booleans())]
    uncut = {p: "" for p in draw(st.sets(st.integers(1, count - 1), max_size=2))}
    return Profile(tuple(units), tuple(forward), tuple(backward), uncut)


@st.composite
def odd_workers(draw: st.DrawFn) -> Workers:
    count = draw(st.integers(2, 3))
    number = st.sampled_from([1.0, 2.0, 4.0])
    return Workers(
        count,
        links=draw(st.sampled_from([Links(1e3), Links(1e4), Links(1e5, 1e-3), Links()])),
        memory=(draw(st.sampled_from([math.inf, 100.0, 1000.0])),) * count,
        in_flight=tuple(draw(st.integers(1, 4)) for _ in range(count)),
        owned_factor=tuple(draw(number) for _ in range(count)),
        owned_ms=tuple(draw(st.sampled_from([0.0, 0.05, 0.2])) for _ in range(count)),
        ratios=draw(ratios()),
    )


CASES: dict[str, tuple[Any, ...]] = {
    "shared": (profiles(), settings_of_workers(), "same"),
    "independent": (profiles(), settings_of_workers(), "bidirectional"),
    "three-way": (profiles(4), settings_of_workers(), "three-way"),
    "dominated cuts": (sparse_profiles(), odd_workers(), "same"),
    "dominated independent cuts": (sparse_profiles(), odd_workers(), "bidirectional"),
    "dominated three-way cuts": (sparse_profiles(4), odd_workers(), "three-way"),
}


@pytest.mark.parametrize("case", CASES)
def test_cuts_equal_brute_force(case: str) -> None:
    profile, workers, mode = CASES[case]
    given(profile, workers, st.just(mode))(check_against_brute_force)()


def simulated_over_planned(profile: Profile, workers: Workers, mode: str) -> float:
    links = Links(workers.links.bandwidth_of(0, 0), workers.links.latency_of(0, 0), workers.links.copy)
    workers = dataclasses.replace(workers, memory=(), microbatches=1, links=links)
    found = partition(profile, workers, mode)
    schedule = make("async", workers.count, 1)
    simulated = simulate(schedule, scenario_of_partition(profile, found, workers, schedule), 12 * workers.count)
    seconds = simulated.seconds_per_minibatch
    return seconds / found.bottleneck if found.bottleneck else float(seconds > 1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(profiles(6), settings_of_workers(2), st.sampled_from(["same", "bidirectional", "three-way"]))
def test_a_run_keeps_what_the_plan_promises(profile: Profile, workers: Workers, mode: str) -> None:
    """Simulated message by message, no run is slower than its plan.

    A known exception, too rare for these cases: a saved value that takes longer to worker 1 than a forward and a
    backward together, for a B whose W waits on worker 0, lengthens the round trip (12% in the one that was found).
    """
    assert simulated_over_planned(profile, workers, mode) <= 1 + 1e-6


@settings(max_examples=60, deadline=None, derandomize=True)
@given(profiles(6), settings_of_workers(4), st.sampled_from(["same", "bidirectional", "three-way"]))
def test_what_travels_past_a_neighbour_may_take_a_little_longer(profile: Profile, workers: Workers, mode: str) -> None:
    assert simulated_over_planned(profile, workers, mode) <= 1.15
