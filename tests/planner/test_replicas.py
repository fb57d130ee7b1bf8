"""Cuts and replicas against brute force, and what replicas cost, by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import naive_planner as naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_plans import partition, profiles, ratios

from fxpipe.errors import CutError
from fxpipe.planner.candidate_workers import Candidates
from fxpipe.planner.cost_model import CostModel, WorkerTimes
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.link_times import all_reduce
from fxpipe.planner.links import Links
from fxpipe.planner.partition import TooLittleMemory, of_cuts
from fxpipe.planner.profile import Profile, Unit, Value, backward_values
from fxpipe.planner.replicated import minibatch_seconds, notation, replicated_partitions
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Machines, Workers
from fxpipe.schedule import Schedule, make
from fxpipe.schedule.versions import Versions


def compositions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to share out exactly so many processes among at most so many workers."""
    if total == 0:
        yield ()
    elif most:
        for first in range(1, total + 1):
            yield from ((first, *rest) for rest in compositions(total - first, most - 1))


def brute_force(profile: Profile, setting: Setting, processes: int, mode: str) -> float:
    """The least bottleneck in milliseconds of all cuts, choices and replicas; inf if nothing fits into memory.

    Workers have something to do: those that have not would only keep processes from others.
    """
    least = math.inf
    for total in range(1, processes + 1):
        for replicas in compositions(total, min(total, len(profile.units)) if mode == "same" else total):
            if max(replicas) > setting.microbatches:
                continue
            workers = setting.workers(len(replicas), replicas)
            costs = CostModel(profile, workers)
            choices = naive.every_choice(workers) if mode != "same" else [(0,) * (workers.count + 1)]
            columns = itertools.product(naive.every_plan(profile, workers, mode), choices)
            plans = np.array([np.stack([*plan, choice], axis=1) for plan, choice in columns])
            costs.remember(plans[:, :-1].reshape(-1, 4), plans[:, 1:].reshape(-1, 4))
            slowest = [costs.price(k, costs.between(plans[:, k], plans[:, k + 1])).cost for k in range(workers.count)]
            least = min(least, float(np.max(slowest, axis=0).min()))
    return least


@st.composite
def settings_of_processes(draw: st.DrawFn) -> Setting:
    links = draw(st.sampled_from([Links(), Links(250.0), Links(1000.0, 0.001), Links(8000.0, 0.0, 0.0005)]))
    machines = None
    if not links.free and draw(st.booleans()):
        machines = Machines(2, draw(st.sampled_from([Links(2000.0), Links(50000.0, 0.0001)])))
    return Setting(
        microbatches=draw(st.sampled_from([3, 4, 12])),
        links=links,
        memory=draw(st.sampled_from([(), (30.0,), (60.0,), (120.0,)])),
        recompute=draw(st.sampled_from(["none", "auto"])),
        ratios=draw(ratios()),
        machines=machines,
        evenly=draw(st.booleans()),
        outer_bytes=draw(st.sampled_from([0.0, 2.0])),
    )


CASES = {
    "shared": (profiles(4), "same", 4),
    "independent": (profiles(3), "bidirectional", 3),
    "three-way": (profiles(2), "three-way", 3),
}


@pytest.mark.parametrize("case", CASES)
def test_cuts_and_replicas_equal_brute_force(case: str) -> None:
    drawn, mode, processes = CASES[case]

    @given(drawn, settings_of_processes())
    def check(profile: Profile, setting: Setting) -> None:
        if setting.evenly:
            setting = replace(setting, microbatches=max(setting.microbatches, processes))
        expected = brute_force(profile, setting, processes, mode)
        if math.isinf(expected):
            with pytest.raises(TooLittleMemory):
                replicated_partitions(profile, setting, processes, (mode,))
            return
        found = replicated_partitions(profile, setting, processes, (mode,))[mode]
        assert 1e3 * found.bottleneck == pytest.approx(expected, rel=1e-7, abs=1e-9)
        assert found.exact
        assert sum(found.replicas) <= processes
        again = of_cuts(profile, setting.workers(len(found.replicas), found.replicas), found.cuts)
        assert again.bottleneck == pytest.approx(found.bottleneck, rel=1e-7, abs=1e-12)

    check()


def chain(*units: Unit) -> Profile:
    values = [Value(i, unit.output_bytes, (i + 1,)) for i, unit in enumerate(units[:-1])]
    return Profile(units, tuple(values), backward_values(units, values))


FRONT = Unit("front", 12.0, 20.0, 10.0, update_ms=3.0, output_bytes=2000.0, parameter_bytes=1000.0)
BACK = Unit("back", 3.0, 5.0, update_ms=6.0, parameter_bytes=9000.0)


def test_what_a_worker_with_replicas_costs() -> None:
    """Three replicas share 12 microbatches: each does four, then exchanges its sums of gradients and updates all."""
    workers = Workers(2, links=Links(1e6, 1e-3), microbatches=12, replicas=(3, 1))
    found = of_cuts(chain(FRONT, BACK), workers, Cuts((0, 1, 2), (0, 1, 2)))
    microbatch = 12 + 20 + 10 + (2000 / 1e6 * 1e3 + 1)  # the gradient that comes back, and its latency
    exchange = 2 * 2 / 3 * 1000 / 1e6 * 1e3 + 2  # hidden by the backward
    assert exchange < 30
    assert 1e3 * found.loads[0].total * 12 == pytest.approx(4 * microbatch + 3)
    assert 1e3 * found.loads[1].total * 12 == pytest.approx(12 * (3 + 5 + (2 + 1)) + 6)
    assert found.bottleneck == max(load.total for load in found.loads)


def test_the_exchange_counts_for_what_the_last_backward_does_not_hide() -> None:
    workers = Workers(1, links=Links(1e5), microbatches=4, replicas=(2,))
    found = of_cuts(chain(FRONT, BACK), workers, Cuts((0, 2), (0, 2)))
    exchange = 2 * 1 / 2 * 10_000 / 1e5 * 1e3
    backward = 20 + 10 + 5
    assert 1e3 * found.bottleneck * 4 == pytest.approx(2 * (12 + 3 + backward) + 9 + exchange - backward)


def test_replicas_that_do_not_divide_the_microbatches_wait_for_the_busiest() -> None:
    profile = chain(replace(FRONT, update_ms=0.0))
    uneven = of_cuts(profile, Workers(1, microbatches=4, replicas=(3,)), Cuts((0, 1), (0, 1)))
    assert 1e3 * uneven.bottleneck * 4 == pytest.approx(2 * 42)
    even = of_cuts(profile, Workers(1, microbatches=4, replicas=(3,), evenly=True), Cuts((0, 1), (0, 1)))
    assert 1e3 * even.bottleneck * 4 == pytest.approx(4 / 3 * 42)


def test_what_one_sends_to_many_occupies_its_wire() -> None:
    """Each of four receives a quarter; one worker sends all of it."""
    front, back = Unit("front", 1.0, 0.0, output_bytes=1e4), Unit("back", 4.0, 0.0, output_bytes=0.0)
    profile = chain(front, back)
    workers = Workers(2, links=Links(1e6), microbatches=4, replicas=(1, 4))
    found = of_cuts(replace(profile, gradients=()), workers, Cuts((0, 1, 2), (0, 1, 2)))
    assert 1e3 * found.loads[0].total == pytest.approx(10.0)
    assert 1e3 * found.loads[1].total == pytest.approx((4 + 10) / 4)


def test_weights_for_many_readers_leave_their_owner_once_for_each() -> None:
    """F of `back` is on four processes of worker 0, its weights are worker 1's: four copies in a minibatch."""
    front, back = Unit("front", 4.0, 8.0), Unit("back", 4.0, 1.0, parameter_bytes=1e4, saved_bytes=0.0)
    workers = Workers(2, links=Links(1e6), microbatches=4, replicas=(4, 1))
    found = of_cuts(replace(chain(front, back), activations=(), gradients=()), workers, Cuts((0, 2, 2), (0, 1, 2)))
    copies = 4 * 1e4 / 1e6 * 1e3
    assert 1e3 * found.loads[0].total * 4 == pytest.approx(max(8 + 8 + (copies - 8), copies))


@pytest.mark.parametrize("mode", ["same", "bidirectional", "three-way"])
def test_one_replica_each_is_a_plain_pipeline(mode: str) -> None:
    profile = chain(
        *(Unit(f"u{i}", 1.0 + i % 3, 2.0, 1.0, output_bytes=50.0 * i, parameter_bytes=9.0) for i in range(8))
    )
    setting = Setting(links=Links(1e5, 1e-4), microbatches=4)
    plain = partition(profile, setting.workers(3), mode)
    ones = partition(profile, setting.workers(3, (1, 1, 1)), mode)
    assert ones.bottleneck == pytest.approx(plain.bottleneck)
    assert [load.memory for load in ones.loads] == [load.memory for load in plain.loads]


def test_the_exchange_between_machines_goes_over_the_link_that_they_share() -> None:
    inner, outer = Links(8e6), Links(1e6)

    def per_byte(*replicas: int, worker: int = 0) -> float:
        workers = Workers(len(replicas), links=outer, microbatches=8, replicas=replicas, machines=Machines(4, inner))
        return all_reduce(workers, worker).rate / 1e3

    assert per_byte(1) == 0
    assert per_byte(4) == pytest.approx(2 * 3 / 4 / 8e6)
    assert per_byte(8) == pytest.approx(2 * 4 * 4 / 8 / 1e6)  # four on each machine send to four on the other, twice
    assert per_byte(3, 2, worker=1) == pytest.approx(2 * 1 / 2 / 1e6)
    assert per_byte(4, 2, worker=1) == pytest.approx(2 * 1 / 2 / 8e6)


def test_messages_within_a_machine_use_its_links() -> None:
    profile = chain(*(Unit(f"u{i}", 1.0, 1.0, output_bytes=1000.0) for i in range(4)))
    workers = Workers(4, links=Links(1e5), microbatches=4, replicas=(1, 1, 1, 1), machines=Machines(2, Links(1e6)))
    found = of_cuts(profile, workers, Cuts((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)))
    assert [1e3 * load.total for load in found.loads] == pytest.approx([2 + 1, 2 + 1 + 10, 2 + 10 + 1, 2 + 1])


def test_replicas_hold_what_keeps_all_processes_busy() -> None:
    setting = Setting(microbatches=60)
    assert setting.workers(2, (15, 1)).in_flight == (2, 1)  # 16 microbatches on 15 processes
    assert setting.workers(2, (1, 15)).in_flight == (16, 1)
    assert setting.workers(3, (4, 4, 4)).in_flight == setting.workers(3).in_flight == (3, 2, 1)
    gpipe = Setting("gpipe", microbatches=12)
    assert gpipe.workers(2, (3, 2)).in_flight == (4, 6)
    assert Setting("1f1b", microbatches=4).workers(2, (4, 2)).in_flight == (1, 1)


def test_little_memory_asks_for_another_plan() -> None:
    """Data parallelism is best for time, but has all weights in each process."""
    profile = chain(*(Unit(f"u{i}", 5.0, 10.0, parameter_bytes=100.0, output_bytes=1.0) for i in range(8)))
    setting = Setting(links=Links(1e6), microbatches=4)
    free = replicated_partitions(profile, setting, 4, ("same",))["same"]
    assert free.replicas == (4,)
    limited = replicated_partitions(profile, replace(setting, memory=(1500.0,)), 4, ("same",))["same"]
    assert max(load.memory for load in limited.loads) <= 1500
    assert limited.replicas != (4,)
    assert len(limited.replicas) > 1
    with pytest.raises(TooLittleMemory, match="4 processes"):
        replicated_partitions(profile, replace(setting, memory=(100.0,)), 4, ("same",))


def test_heavy_weights_at_the_end_have_no_replicas() -> None:
    """As in VGG: convolutions compute, the last layers have the weights."""
    layers = [Unit(f"conv{i}", 10.0, 20.0, output_bytes=1e4, parameter_bytes=1e3) for i in range(13)]
    profile = chain(*layers, Unit("fc", 2.0, 4.0, output_bytes=1e3, parameter_bytes=4e7))
    found = replicated_partitions(profile, Setting(links=Links(1e8), microbatches=8, evenly=True), 8)
    assert found["same"].replicas == (7, 1)
    assert notation(found["same"].replicas) == "7-1"
    assert found["bidirectional"].bottleneck <= found["same"].bottleneck
    everything = partition(profile, Setting(links=Links(1e8), microbatches=8).workers(1, (8,)), "same")
    assert found["same"].bottleneck < 0.5 * everything.bottleneck


def test_fewer_processes_where_more_are_slower() -> None:
    profile = chain(Unit("only", 1.0, 1.0, parameter_bytes=1e6))
    found = replicated_partitions(profile, Setting(links=Links(1e6), microbatches=8), 8, ("same",))["same"]
    assert found.replicas == (1,)
    assert found.efficiency == pytest.approx(1 / 8)


def test_many_processes_and_units_stay_within_bounds() -> None:
    units = [
        Unit(f"u{i}", 1.0 + i % 7, 2.0 + i % 5, output_bytes=1e5 / (1 + i % 11), parameter_bytes=1e4 * (1 + i % 13))
        for i in range(120)
    ]
    setting = Setting(links=Links(1e9), microbatches=32, evenly=True)
    found = replicated_partitions(chain(*units), setting, 32, budget=2_000_000)
    assert found["same"].bottleneck >= found["bidirectional"].bottleneck >= found["three-way"].bottleneck
    for made in found.values():
        assert 0 < made.lower_bound <= made.bottleneck
        assert made.efficiency > 0.9


@pytest.mark.parametrize("machines", [None, Machines(8, Links(1e10))])
def test_many_processes_have_replicas_that_one_would_run(machines: Machines | None) -> None:
    units = [Unit(f"u{i}", 1.0 + i % 3, 2.0 + i % 2, output_bytes=1e6, parameter_bytes=1e8) for i in range(12)]
    setting = Setting(links=Links(1e9), microbatches=48, evenly=True, machines=machines)
    found = replicated_partitions(chain(*units), setting, 24, ("same",))["same"]
    even = {1, 2, 3, 4, 6, 8, 12, 16, 24}
    assert set(found.replicas) <= (even if machines else even | {24 - n for n in even})
    assert not found.exact  # of 24 processes, 11 and 13 might be better


def test_a_large_plan_times_boundaries_once_for_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of 256 processes that a worker may begin at, each of its depths, and all that it may hold there."""
    timed = []

    def counted(
        costs: CostModel, worker: int, of: Candidates, times: Callable[..., WorkerTimes] = CostModel.times
    ) -> WorkerTimes:
        timed.append(len(of))
        return times(costs, worker, of)

    def refused(versions: Versions, schedule: Schedule) -> None:
        raise AssertionError("what each worker holds follows from its own row")

    monkeypatch.setattr(CostModel, "times", counted)
    monkeypatch.setattr(Versions, "__init__", refused)
    units = [Unit(f"u{i}", 1.0 + i % 3, 2.0 + i % 2, output_bytes=1e6, parameter_bytes=1e8) for i in range(24)]
    setting = Setting(links=Links(1e9), microbatches=31, evenly=True, machines=Machines(8, Links(1e10)), memory=(4e9,))
    found = replicated_partitions(chain(*units), setting, 256, ("same",))["same"]
    assert len(found.replicas) > 1
    assert len(timed) < 300
    assert sum(timed) < 20_000


def test_more_workers_are_tried_only_where_fewer_do_not_fit() -> None:
    """Two of 36 units fit: 18 workers are enough, and each has two replicas."""
    units = [Unit(f"u{i}", 1.0, 2.0, parameter_bytes=100.0) for i in range(36)]
    setting = Setting("1f1b", microbatches=2, memory=(700.0,))
    assert replicated_partitions(chain(*units), setting, 36, ("same",))["same"].replicas == (2,) * 18


def test_a_flush_counts_filling_and_draining() -> None:
    """Six microbatches on three workers of 3 ms: a pipeline of 1F1B takes six and two more."""
    profile = chain(*(Unit(f"u{i}", 1.0, 2.0) for i in range(3)))
    setting = Setting("1f1b", microbatches=6)
    pipeline = partition(profile, setting.workers(3, (1, 1, 1)), "same")
    workers = setting.workers(3, (1, 1, 1))
    assert minibatch_seconds(pipeline, workers, flush=False) == pytest.approx(0.018)
    assert minibatch_seconds(pipeline, workers, flush=True) == pytest.approx(0.024)
    assert replicated_partitions(profile, setting, 3)["same"].replicas == (3,)  # which has nothing to fill


def test_what_has_no_replicas_says_so() -> None:
    with pytest.raises(CutError, match="several workers in each process"):
        Setting("interleaved", microbatches=4).workers(4, (1, 1, 1, 1))
    with pytest.raises(CutError, match="8 replicas of a worker cannot share 4 microbatches"):
        Setting(microbatches=4).workers(1, (8,))
    with pytest.raises(CutError, match="the speeds of processes differ"):
        Setting(microbatches=4, speeds=(1.0, 0.5)).workers(2, (1, 1))
    with pytest.raises(CutError, match="2 numbers of replicas for 3 workers"):
        Setting(microbatches=4).workers(3, (1, 1))


@pytest.mark.parametrize(
    ("replicas", "written"),
    [((15, 1), "15-1"), ((16,), "16"), ((2, 1, 1), "2-1-1"), ((1, 1, 1), "straight (3)"), ((2,) * 5 + (1,), "5×2-1")],
)
def test_configurations_are_written_as_in_the_paper(replicas: tuple[int, ...], written: str) -> None:
    assert notation(replicas) == written


def test_the_stages_of_a_schedule_are_the_workers_of_a_plain_plan() -> None:
    setting = Setting("1f1b", microbatches=6)
    assert [stage.held for stage in setting.stages_of(3)] == list(setting.workers(3).in_flight)
    assert make("1f1b", 3, 6).synchronous == setting.stages_of(3)[0].flush
