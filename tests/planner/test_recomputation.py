"""Plans that compute values again to save memory, against brute force and against plans that do not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_plans import check_against_brute_force, partition, profiles, settings_of_workers

from fxpipe.errors import ProfileError
from fxpipe.planner.partition import TooLittleMemory, partitions
from fxpipe.planner.profile import Profile, SavingLevel, Unit, Value, backward_values, read_profile_json
from fxpipe.planner.setting import Setting
from fxpipe.planner.unit_sums import levels_of
from fxpipe.planner.workers import Workers


@st.composite
def with_levels(draw: st.DrawFn, most: int = 4) -> Profile:
    """A profile whose units have levels, each saving less than the one before."""
    profile = draw(profiles(most))
    count = draw(st.integers(0, 2))
    units = []
    for unit in profile.units:
        saved, levels = unit.saved_bytes, []
        for _ in range(count):
            less = draw(st.sampled_from([0.0, 0.0, 0.5, 0.9])) * saved
            made = unit.saved_bytes - saved + less
            alive = draw(st.sampled_from([0.5, 1.0, 3.0])) * made
            deferred = made if unit.weight_ms else 0.0
            levels.append(SavingLevel(saved - less, draw(st.sampled_from([0.0, 0.5, 2.0])), made, alive, deferred))
            saved -= less
        units.append(dataclasses.replace(unit, levels=tuple(levels)))
    return dataclasses.replace(profile, units=tuple(units))


@st.composite
def short_of_memory(draw: st.DrawFn) -> Workers:
    workers = draw(settings_of_workers())
    return dataclasses.replace(
        workers,
        memory=tuple(draw(st.sampled_from([10.0, 20.0, 30.0, 40.0, 60.0, math.inf])) for _ in range(workers.count)),
        deferred=tuple(draw(st.integers(0, 2)) for _ in range(workers.count)),
        recompute=draw(st.sampled_from(["auto", "auto", "full"])),
    )


@pytest.mark.parametrize("mode", ["same", "bidirectional", "three-way"])
def test_cuts_equal_brute_force(mode: str) -> None:
    given(with_levels(), short_of_memory(), st.just(mode))(check_against_brute_force)()


def chain(count: int = 8, **more: Any) -> Profile:
    """Units that are alike: each saves ten times what enters it."""
    units = tuple(Unit(f"u{i}", 1.0, 2.0, output_bytes=10.0, saved_bytes=100.0, **more) for i in range(count))
    activations = tuple(Value(i, 10.0, (i + 1,)) for i in range(count - 1))
    return Profile(units, activations, backward_values(units, activations))


def test_a_unit_without_levels_keeps_its_inputs_and_is_computed_again() -> None:
    (level,) = levels_of(chain(3, fixed_bytes=5.0))
    assert [row.saved_bytes for row in level] == [5.0, 15.0, 15.0]
    assert [row.again_ms for row in level] == [1.0, 1.0, 1.0]
    unchanged = Unit("norm", 1.0, 2.0, output_bytes=10.0, saved_bytes=10.0)
    profile = dataclasses.replace(chain(2), units=(chain(1).units[0], unchanged))
    assert levels_of(profile)[0][1] == SavingLevel(10.0, 0.0), "keeping the input would take as much"


def test_what_does_not_fit_fits_with_recomputation_in_the_least_time() -> None:
    """Worker 0 has two microbatches of four units in flight."""
    profile = chain()
    enough = Workers(2, memory=(800.0, 400.0), recompute="auto")
    assert partition(profile, enough).loads[0].recompute == 0
    short = dataclasses.replace(enough, memory=(250.0, 400.0))
    with pytest.raises(TooLittleMemory):
        partition(profile, dataclasses.replace(short, recompute="none"), "same")
    found = partition(profile, short, "same")
    assert all(load.memory <= limit for load, limit in zip(found.loads, short.memory, strict=True))
    assert found.loads[0].recompute > 0
    assert found.loads[1].recompute == 0, "its memory is not short"
    full = partition(profile, Workers(2, recompute="full"), "same")
    assert [load.recompute for load in full.loads] == [pytest.approx(4e-3)] * 2


def test_microbatches_between_b_and_w_keep_what_w_reads() -> None:
    profile = chain(4, weight_ms=1.0)
    plain = Workers(1, in_flight=(3,), memory=(1e6,), recompute="full")
    later = dataclasses.replace(plain, deferred=(2,))
    one, other = (partition(profile, workers, "same").loads[0] for workers in (plain, later))
    assert other.values - one.values == 2 * 4 * 100.0
    assert Setting(schedule="zb-h1", microbatches=4).workers(2).deferred == (1, 2)
    assert Setting(schedule="1f1b", microbatches=4).workers(2).deferred == (0, 0)


def test_levels_are_in_profiles() -> None:
    units = tuple(
        dataclasses.replace(u, levels=(SavingLevel(50.0, 1.0, 50.0, 50.0), SavingLevel(10.0, 2.0)))
        for u in chain().units
    )
    profile = dataclasses.replace(chain(), units=units)
    assert read_profile_json(profile.to_json(), error=ProfileError) == profile
    wrong = profile.to_json().replace('"again_ms": 2.0', '"again_ms": -2.0', 1)
    with pytest.raises(ProfileError, match="-2 is not a time or size"):
        read_profile_json(wrong, error=ProfileError)


@pytest.mark.slow
def test_many_workers_are_planned_soon() -> None:
    """64 workers and a thousand units: a plan that fits is found, however good it is proved to be."""
    units = tuple(
        dataclasses.replace(
            u, parameter_bytes=1.0, levels=tuple(SavingLevel(100.0 / 2**i, 0.2 * i) for i in range(1, 6))
        )
        for u in chain(1000).units
    )
    profile = dataclasses.replace(chain(1000), units=units)
    workers = Workers(64, memory=(12_000.0,) * 64, recompute="auto")
    found = partitions(profile, workers, ("same", "bidirectional"), budget=1_000_000)
    assert all(load.memory <= 12_000 for load in found["bidirectional"].loads)
    assert found["bidirectional"].loads[0].recompute > found["bidirectional"].loads[63].recompute == 0
