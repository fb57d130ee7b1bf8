"""The search: never worse than a schedule's own plan, near the optimum, and what it says."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
from chains import chain
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CutError, PolicyError
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.links import NCCL_NODE, Links
from fxpipe.planner.partition import TooLittleMemory
from fxpipe.planner.profile import Profile, Unit, Value, backward_values
from fxpipe.planner.separate_cuts import why_shared
from fxpipe.planner.setting import Setting
from fxpipe.policy import default_for
from fxpipe.schedule import SCHEDULES, make
from fxpipe.search import Question, Ranking, Sized, microbatch_counts, schedules_of, search
from fxpipe.search.candidate import candidates
from fxpipe.search.reasons import TIE
from fxpipe.search.side_by_side import advised_partitions
from fxpipe.simulator.of_partition import scenario_of_partition
from fxpipe.simulator.simulate import simulate, steady_minibatches

EVEN = [(1.0, 1.0, 1.0)] * 8


def asked(profile: Profile, workers: int, synchronous: bool = True, counts: tuple[int, ...] = (4,), **more: Any) -> Any:
    """Rank a profile of 64 samples a minibatch, with a stage a process; more of it goes to the setting."""
    sizes = [Sized(Setting(microbatches=m, **more), profile, profile, samples=64) for m in counts]
    return search(sizes, Question(workers, single(synchronous)))


def single(synchronous: bool) -> tuple[str, ...]:
    """The schedules with one stage a process."""
    return tuple(name for name in schedules_of(synchronous) if SCHEDULES[name].usual_virtual == 1)


def own_plan(profile: Profile, setting: Setting, workers: int) -> float:
    """The forecast of shared cuts for the setting's schedule; of separate ones if only they fit, inf if none does."""
    try:
        found = advised_partitions(profile, setting, workers, ("same", "bidirectional"))
    except TooLittleMemory:
        return math.inf
    chosen = found.get("same", found["bidirectional"])
    schedule = setting.schedule_of(workers)
    scenario = scenario_of_partition(profile, chosen, setting.workers(workers), schedule)
    return simulate(schedule, scenario, steady_minibatches(schedule)).seconds_per_minibatch


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Chains with a skip here and there, with messages, saved values and weights."""
    time = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 9.0])
    size = st.sampled_from([0.0, 1e3, 1e4])
    count = draw(st.integers(3, 7))
    units = tuple(
        Unit(f"u{i}", draw(time) + 0.5, draw(time) + 0.5, draw(time), draw(st.sampled_from([0.0, 0.5])),
             output_bytes=draw(size), saved_bytes=draw(size), parameter_bytes=draw(size))
        for i in range(count)
    )  # fmt: skip
    values = [Value(i, units[i].output_bytes, (i + 1,)) for i in range(count - 1)]
    if draw(st.booleans()):
        values[0] = Value(0, units[0].output_bytes, (1, count - 1))
    return Profile(units, tuple(values), backward_values(units, values))


LINKS = [Links(), Links(3e9, 50e-6, 0.33e-9), Links(1e6, 1e-3), Links(1e7, 5e-3, 1e-8)]


CASES = st.tuples(
    profiles(),
    st.integers(2, 3),
    st.sampled_from([1, 2, 4, 6]),
    st.sampled_from(LINKS),
    st.sampled_from([math.inf, 6e4, 1.2e5]),
    st.booleans(),
)


@settings(max_examples=2)
@given(CASES)
def test_never_worse_than_any_schedule_with_its_own_plan(case: tuple[Any, ...]) -> None:
    check_never_worse(*case)


@pytest.mark.slow
@settings(max_examples=8)
@given(CASES)
def test_never_worse_in_many_cases(case: tuple[Any, ...]) -> None:
    check_never_worse(*case)


def check_never_worse(
    profile: Profile, workers: int, count: int, links: Links, memory: float, synchronous: bool
) -> None:
    base = Setting(microbatches=count, links=links, memory=(memory,) * workers)
    fixed = {}
    for name in schedules_of(synchronous):
        placement = SCHEDULES[name].usual_placement(workers)
        if len(placement) <= len(profile.units):
            policy = default_for(make(name, len(placement), count, placement))
            setting = dataclasses.replace(base, schedule=name, policy=policy, placement=placement)
            fixed[name] = own_plan(profile, setting, len(placement))
    best = min(fixed.values())
    sized = Sized(base, profile, profile, samples=64)
    question = Question(workers, schedules_of(synchronous))
    if math.isinf(best):
        try:  # cuts for W alone may fit where no other do
            found = search([sized], question)
        except TooLittleMemory:
            return
        assert {row.cuts for row in found.rows if row.seconds is not None} == {"three-way"}
        return
    found = search([sized], question)
    assert found.best.seconds <= best * (1 + TIE) * (1 + 1e-9)
    forecasts = {row.schedule: row.seconds for row in found.rows if row.seconds is not None}
    for name, seconds in fixed.items():  # each row is at least as fast as the schedule's own plan, too
        if math.isfinite(seconds):
            assert forecasts[name] <= seconds * (1 + TIE) * (1 + 1e-9)
    assert found.best.memory <= memory * (1 + 1e-6)


def test_memory_for_what_1f1b_holds_takes_zb_h1() -> None:
    """ZB-H2 would have no bubble, with more microbatches in flight."""
    profile = chain([(1.0, 1.0, 1.0)] * 2, saved=1.0)
    assert 1e3 * asked(profile, 2).best.seconds == pytest.approx(12.0)
    tight = asked(profile, 2, memory=(2.0,) * 2)
    assert tight.best.setting.schedule == "zb-h1"
    assert 1e3 * tight.best.seconds == pytest.approx(13.0)  # (N−1)(F+B−W) more


def test_rows_say_what_they_lose_and_why() -> None:
    found: Ranking = asked(chain(EVEN), 4, counts=(8,))
    assert [row.schedule for row in found.rows][:2] == ["zb-h2", "zb-h1"]
    assert {row.schedule for row in found.rows} == set(single(True))
    assert found.rows[0].why == ""
    assert found.rows[1].why == "bubble 11% against 0%"
    assert [row.seconds for row in found.rows] == sorted(row.seconds or 0 for row in found.rows)
    assert all(row.staleness == 0 for row in found.rows)


def test_several_stages_a_process_compete() -> None:
    """Where memory holds what 1F1B holds, a V has no bubble; where links are slow, it pays for its messages."""
    profile = chain([(1.0, 1.0, 1.0)] * 16, saved=1e6)
    sized = Sized(Setting(microbatches=8, memory=(24e6,) * 4), profile, profile, samples=64)
    schedules = ("1f1b", "zb-h1", "interleaved", "zb-v")
    found = search([sized], Question(4, schedules))
    assert found.best.setting.schedule == "zb-v"
    assert found.best.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert found.best.simulation.bubble == pytest.approx(0, abs=1e-9)
    assert found.best.memory == 16e6
    slow = dataclasses.replace(sized, setting=dataclasses.replace(sized.setting, links=Links(latency=0.1)))
    assert search([slow], Question(4, schedules)).best.placement == (0, 1, 2, 3)
    two = search([sized], Question(4, schedules, virtual=2))
    assert len(two.best.placement) == 8
    assert "1f1b" in {row.schedule for row in two.rows}


def test_links_are_named_where_they_are_what_is_lost() -> None:
    slow = asked(chain(EVEN), 2, False, counts=(8,), links=Links(latency=5e-3))
    why = {row.schedule: row.why for row in slow.rows}
    assert any("for links against" in text for text in why.values()), why


def test_smaller_microbatches_that_cost_more_are_named() -> None:
    sizes = [
        Sized(Setting(microbatches=count), p := chain([(t, t, t)] * 4), p, samples=64)
        for count, t in ((4, 1.0), (16, 0.6))
    ]
    found = search(sizes, Question(2, ("1f1b",)))
    assert [row.microbatches for row in found.rows] == [4, 16]
    assert found.rows[1].why == "microbatches of 4 samples cost 2.40 times per sample"


def test_of_ties_the_simplest_is_taken() -> None:
    one = asked(chain(EVEN), 1, False, counts=(4,))
    assert one.best.setting.schedule in ("gpipe", "1f1b")  # all are equally fast on one worker
    assert one.best.candidate.mode == "same"
    assert {row.why for row in one.rows[1:]} <= {
        "as fast, but weight gradients are separate",
        "as fast, and no simpler",
        "as fast, but without a flush",
    }
    with_more = asked(chain([(1.0, 1.0, 0.0)] * 4, saved=1e6), 2, counts=(8,))
    assert with_more.best.setting.schedule == "1f1b"  # gpipe takes as long, and holds all microbatches
    assert any("as fast, but a worker holds" in row.why for row in with_more.rows if row.schedule == "gpipe")


def test_separate_cuts_must_gain_more_than_the_noise_and_over_slower_links() -> None:
    """Shared cuts take 13 ms a microbatch at best, separate ones 12, which forwards hide messages of 5 ms in."""
    plain = chain([(5.0, 1.0, 0.0), (6.0, 1.0, 0.0), (10.0, 1.0, 0.0)], saved=1e8)
    measured = dataclasses.replace(NCCL_NODE, latency=11e-6)
    compared, why = [], []
    for noise, links in ((0.0, Links()), (0.05, Links()), (0.1, Links()), (0.0, measured), (0.0, NCCL_NODE)):
        profile = dataclasses.replace(plain, doubt=noise)
        found = search([Sized(Setting(microbatches=4, links=links), profile, profile)], Question(2, ("async",)))
        assert found.best.candidate.mode == found.partitions[-1].mode
        compared.append([(partition.mode, round(1e3 * (partition.simulated or 0))) for partition in found.partitions])
        why.append(why_shared(found.partitions, profile))
    same, separate = ("same", 52), ("bidirectional", 48)
    assert compared == [[same, separate], [same, separate], [separate, same], [same, separate], [separate, same]]
    gain = "for 381 MiB a minibatch more between workers"
    doubts = (f"7.7% {gain}, within the noise of the measured times (10%)", f"7.6% {gain}, but not over slower links")
    assert why == ["", "", f"separate ones would gain {doubts[0]}", "", f"separate ones would gain {doubts[1]}"]


def test_async_competes_and_says_how_stale_it_is() -> None:
    found = asked(chain(EVEN, parameters=100.0), 4, False, counts=(2, 4))
    assert found.best.setting.schedule == "async"
    assert {row.microbatches: row.staleness for row in found.rows if row.schedule == "async"} == {2: 2, 4: 1}


def test_what_does_not_fit_is_listed_with_what_would_be_enough() -> None:
    found = asked(chain(EVEN, saved=1e6), 2, counts=(8,), memory=(8.5e6,) * 2)
    missing = {row.schedule: row for row in found.rows if row.seconds is None}
    assert "gpipe" in missing
    assert missing["gpipe"].enough_bytes == pytest.approx(32e6)
    assert "would be enough" in missing["gpipe"].why
    again = asked(chain(EVEN, saved=1e6), 2, counts=(8,), memory=(missing["gpipe"].enough_bytes,) * 2)
    assert all(row.seconds is not None for row in again.rows if row.schedule == "gpipe")


def test_memory_that_nothing_fits_says_what_would() -> None:
    with pytest.raises(TooLittleMemory, match="1f1b with 2 microbatches, which needs least") as caught:
        asked(chain(EVEN, saved=1e6), 2, counts=(2, 8), memory=(1e6,) * 2)
    assert "give every worker" in str(caught.value.hint)


def test_given_cuts_are_kept() -> None:
    profile = chain(EVEN)
    cuts = Cuts((0, 3, 8), (0, 4, 8))
    found = search([Sized(Setting(microbatches=4), profile, profile, 64, cuts)], Question(2, schedules_of(True)))
    assert (found.best.partition.forward, found.best.partition.backward) == (cuts.forward, cuts.backward)
    assert {row.cuts for row in found.rows} == {"pinned"}
    narrow = Sized(Setting(microbatches=4, memory=(10.0, 10.0)), full := chain(EVEN, saved=5.0), full, 64, cuts)
    with pytest.raises(TooLittleMemory, match="these cuts do not fit"):
        search([narrow], Question(2, ("gpipe",)))


def test_a_policy_leaves_out_the_schedules_that_have_no_use_for_it() -> None:
    profile = chain(EVEN)
    sized = Sized(Setting(microbatches=4), profile, profile, 64)
    found = search([sized], Question(2, schedules_of(False), policy="stash"))
    assert found.best.setting.schedule == "async"
    refused = [row for row in found.rows if row.seconds is None]
    assert {row.schedule for row in refused} == set(schedules_of(True))
    assert all("makes no sense" in row.why for row in refused)
    with pytest.raises(PolicyError):
        search([sized], Question(2, schedules_of(True), policy="stash"))


def test_more_workers_than_units_are_refused() -> None:
    with pytest.raises(CutError, match="only 2 units"):
        asked(chain([(1.0, 1.0, 1.0)] * 2), 3)


def test_candidates_have_three_way_cuts_where_w_is_apart() -> None:
    profile = chain(EVEN)
    found = candidates(Question(2, tuple(SCHEDULES)), Sized(Setting(microbatches=4), profile, profile))
    apart = {c.schedule for c in found if c.mode == "three-way"}
    assert apart == {name for name, kind in SCHEDULES.items() if kind.weights_apart}
    one = candidates(Question(2, ("1f1b",), modes=("three-way",)), Sized(Setting(), profile, profile))
    assert [c.mode for c in one] == ["three-way"]


def test_more_microbatches_as_long_as_they_gain() -> None:
    """A microbatch takes its share of the time of all samples, and something for itself."""
    asked_for: list[int] = []

    def sized(count: int, each: float) -> Sized:
        profile = chain([(8 / count + each, 8 / count + each, 8 / count + each)] * 4)
        return Sized(Setting(microbatches=count), profile, profile, samples=64)

    def best(each: float) -> int:
        def larger(count: int) -> Sized | None:
            asked_for.append(count)
            return sized(2 * count, each) if count < 64 else None

        found = search([sized(2, each), sized(4, each)], Question(2, ("1f1b",)), larger=larger)
        assert sorted({row.microbatches for row in found.rows}) == [
            2,
            4,
            *[2 * count for count in asked_for if count < 64],
        ]
        return found.best.candidate.microbatches

    assert best(2.0) == 2
    assert asked_for == []
    assert best(0.1) == 8
    assert asked_for == [4, 8], "16 are slower, so that 32 are not tried"
    asked_for.clear()
    assert best(0.0) == 64
    assert asked_for == [4, 8, 16, 32, 64]


@given(st.integers(1, 8), st.integers(1, 200), st.booleans())
def test_microbatch_counts_divide_and_hold_the_usual_ones(workers: int, samples: int, synchronous: bool) -> None:
    names = schedules_of(synchronous)
    counts = microbatch_counts(workers, samples, names)
    found = counts.first
    assert 1 <= len(found) <= 3
    assert list(found) == sorted(set(found))
    assert all(samples % count == 0 for count in found)
    assert {SCHEDULES[name].usual_microbatches(workers, samples) for name in names} <= set(found)
    more = [found[-1]]
    while (after := counts.after(more[-1])) is not None:
        more.append(after)
    assert all(samples % b == 0 and b >= 2 * a for a, b in pairwise(more))
    assert 2 * more[-1] > samples
