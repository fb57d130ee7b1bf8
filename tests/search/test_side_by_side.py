"""Cuts between branches, against all cuts that there are."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from branched import branched
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxpipe.planner.branches import borders, graph_of_cuts
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.partition import Partition, TooLittleMemory, of_cuts, partitions
from fxpipe.planner.profile import Profile
from fxpipe.planner.setting import Setting
from fxpipe.search.side_by_side import WORTH, planned_side_by_side
from fxpipe.simulator.of_partition import scenario_of_partition
from fxpipe.simulator.simulate import simulate, steady_minibatches


def minibatch(profile: Profile, setting: Setting, partition: Partition) -> float:
    """The simulated seconds of a minibatch."""
    count = len(partition.loads)
    schedule = setting.schedule_of(count).along(graph_of_cuts(profile, partition.cuts))
    scenario = scenario_of_partition(profile, partition, setting.workers(count), schedule)
    return simulate(schedule, scenario, steady_minibatches(schedule)).seconds_per_minibatch


def every(profile: Profile, setting: Setting, workers: int) -> list[Partition]:
    """All shared cuts."""
    count = len(profile.units)
    inner = combinations_with_replacement(range(count + 1), workers - 1)
    cuts = [(0, *places, count) for places in inner]
    return [of_cuts(profile, setting.workers(workers), Cuts(at, at)) for at in cuts]


@settings(max_examples=5)
@given(
    st.sampled_from([(2, 2), (3, 3), (2, 1, 2), (3, 2)]),
    st.integers(2, 4),
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    st.integers(1, 4),
    st.sampled_from([0.1, 1.0]),
)
def test_with_a_flush_no_shared_cuts_are_faster(
    lengths: tuple[int, ...], workers: int, name: str, microbatches: int, head: float
) -> None:
    profile, setting = branched(*lengths, head=head), Setting(schedule=name, microbatches=microbatches)
    assume(borders(profile, workers))
    found = planned_side_by_side(profile, setting, workers, ("same",))["same"]
    fastest = min(minibatch(profile, setting, one) for one in every(profile, setting, workers))
    assert minibatch(profile, setting, found) <= fastest * 1.0002


@pytest.mark.parametrize("microbatches", [1, 4])
def test_without_a_flush_the_fewest_updates_are_missed_that_cost_little(microbatches: int) -> None:
    profile, setting = branched(3, 3), Setting(schedule="async", microbatches=microbatches)
    found = planned_side_by_side(profile, setting, 4, ("same",))["same"]

    def depth(one: Partition) -> int:
        return setting.schedule_of(4).along(graph_of_cuts(profile, one.cuts)).depths[0]

    plans = every(profile, setting, 4)
    fastest = min(minibatch(profile, setting, one) for one in plans)
    near = [one for one in plans if minibatch(profile, setting, one) <= fastest * (1 + WORTH)]
    assert depth(found) == min(map(depth, near)) == 2
    assert minibatch(profile, setting, found) <= fastest * (1 + WORTH)


def test_four_branches_on_four_workers_fill_at_once() -> None:
    profile, setting = branched(4, 4, 4, 4), Setting(schedule="1f1b", microbatches=4)
    chain = partitions(profile, setting.workers(4), ("same",))["same"]
    schedule = setting.schedule_of(4)
    scenario = scenario_of_partition(profile, chain, setting.workers(4), schedule)
    found = planned_side_by_side(profile, setting, 4, ("same",))["same"]
    assert found.forward == (0, 4, 8, 12, 17)
    slow = simulate(schedule, scenario, steady_minibatches(schedule)).seconds_per_minibatch
    assert slow > 1.25 * minibatch(profile, setting, found)


def test_a_model_may_fit_with_its_branches_side_by_side_alone() -> None:
    """In a chain, the first of four workers holds four microbatches; side by side, each holds two."""
    profile, roomy = branched(4, 4, 4, 4), Setting(schedule="1f1b", microbatches=4)
    chain = partitions(profile, roomy.workers(4), ("same",))["same"]
    least = max(load.memory for load in planned_side_by_side(profile, roomy, 4, ("same",))["same"].loads)
    assert least < 0.8 * max(load.memory for load in chain.loads)
    tight = Setting(schedule="1f1b", microbatches=4, memory=(least,))
    with pytest.raises(TooLittleMemory):
        partitions(profile, tight.workers(4), ("same",))
    found = planned_side_by_side(profile, tight, 4, ("same",))["same"]
    assert max(load.memory for load in found.loads) <= least
    with pytest.raises(TooLittleMemory):
        planned_side_by_side(profile, Setting(schedule="1f1b", microbatches=4, memory=(least / 4,)), 4, ("same",))
