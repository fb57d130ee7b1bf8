"""Several workers on a rank: interleaved and V schedules, and rows that are merged."""

from __future__ import annotations

import inspect
from textwrap import indent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import ScheduleError
from fxpipe.plan.cost_records import StageTime
from fxpipe.schedule import (
    SCHEDULES,
    Action,
    DualPipeV,
    Interleaved,
    Schedule,
    Versions,
    VHalf,
    VMin,
    WPipe,
    ZeroBubbleV,
    check,
    grid,
    make,
)
from fxpipe.simulator.scenario import Scenario
from fxpipe.simulator.simulate import simulate

V = [ZeroBubbleV, VHalf, VMin, DualPipeV]


def on(kind: type[Schedule], ranks: int, microbatches: int) -> Schedule:
    placement = kind.usual_placement(ranks)
    return kind(len(placement), microbatches, placement)


@pytest.mark.parametrize("kind", [Interleaved, *V])
def test_the_picture_stands_in_the_docstring(kind: type[Schedule]) -> None:
    assert indent(grid(on(kind, 2, 2), 1), "    ") in (inspect.getdoc(kind) or "")


def test_wpipe_in_its_docstring() -> None:
    for line in grid(on(WPipe, 2, 2), 3).splitlines():
        assert f"    {line[: 8 + 14 * 7].rstrip()} …" in (inspect.getdoc(WPipe) or "")


@given(st.integers(1, 6), st.integers(1, 6))
def test_wpipe_in_closed_form(ranks: int, microbatches: int) -> None:
    """The first group misses one update in forwards, all else none. With enough microbatches no rank waits."""
    versions = Versions(on(WPipe, ranks, microbatches))
    for worker in range(2 * ranks):
        for j in range(microbatches):
            assert versions.lag("F", worker, worker, j) == (worker < ranks)
            assert versions.lag("B", worker, worker, j) == 0
    for backward in (1, 2):
        times = (StageTime(1, backward),) * (2 * ranks)
        found = simulate(versions.schedule, Scenario(times, placement=versions.schedule.placement), 20)
        steady = (found.finished[-5] - found.finished[-10]) / 5
        assert steady == 2 * microbatches * (1 + backward) * max(1, ranks + 1 - microbatches)


def test_workers_of_a_rank_have_made_as_many_updates_when_the_first_has_made_one() -> None:
    """`training_loop` relies on it."""
    schedule = on(WPipe, 3, 4)
    for rank in range(3):
        made = dict.fromkeys(schedule.hosted(rank), 0)
        for worker, action in schedule.row_until(rank, 5):
            if schedule.updated_by(action) is not None:
                made[worker] += 1
                assert worker != rank or len({*made.values()}) == 1


@pytest.mark.parametrize("kind", [ZeroBubbleV, DualPipeV])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (3, 7), (4, 8), (4, 10), (8, 32)])
def test_it_has_torchs_order(kind: type[Schedule], ranks: int, microbatches: int) -> None:
    torchs = pytest.importorskip("torch.distributed.pipelining.schedules")
    name = {ZeroBubbleV: "ScheduleZBVZeroBubble", DualPipeV: "ScheduleDualPipeV"}[kind]  # type: ignore[index]
    made = getattr(torchs, name).__new__(getattr(torchs, name))
    made.pp_group_size, made.num_stages, made._num_stages, made._n_microbatches = (
        *(ranks, 2 * ranks, 2 * ranks),
        microbatches,
    )
    schedule = on(kind, ranks, microbatches)
    for rank in range(ranks):
        found: list[str] = []
        for operation in filter(None, made._calculate_single_rank_operations(rank)):
            for one in operation.sub_actions or [operation]:
                text = str(one)
                found += [text.replace("B", "I"), text.replace("B", "W")] if "B" in text else [text]
        own = [f"{w}{'I' if a.phase == 'B' else a.phase}{a.microbatch}" for w, a in schedule.row_until(rank, 1)]
        assert own == found


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), [(2, 2, 4), (3, 2, 6), (4, 3, 8), (2, 4, 2)])
def test_interleaved_has_torchs_order(ranks: int, virtual: int, microbatches: int) -> None:
    torchs = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = torchs.ScheduleInterleaved1F1B
    made = kind.__new__(kind)
    made.n_local_stages, made.pp_group_size, made._n_microbatches = virtual, ranks, microbatches
    made.microbatches_per_round = ranks
    schedule = make("interleaved", ranks * virtual, microbatches, Interleaved.usual_placement(ranks, virtual))
    for rank in range(ranks):
        found = [str(operation) for operation in made._calculate_single_rank_operations(rank) if operation]
        assert [f"{w}{a.phase}{a.microbatch}" for w, a in schedule.row_until(rank, 1)] == found


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 13))
def test_interleaved_runs_with_any_number_of_microbatches(ranks: int, virtual: int, microbatches: int) -> None:
    schedule = make("interleaved", ranks * virtual, microbatches, Interleaved.usual_placement(ranks, virtual))
    check(schedule, 2)
    Versions(schedule)


@given(st.integers(2, 8), st.integers(1, 3), st.tuples(*[st.integers(1, 5)] * 2))
def test_the_bubble_of_interleaved(ranks: int, groups: int, times: tuple[int, int]) -> None:
    """Narayanan et al. 2021: (R − 1)(F + B) of a worker's times, whatever the number of workers on a rank."""
    forward, backward = times
    for virtual in (2, 3):
        schedule = make("interleaved", ranks * virtual, groups * ranks, Interleaved.usual_placement(ranks, virtual))
        costs = (StageTime(forward, backward),) * schedule.workers
        found = simulate(schedule, Scenario(costs, placement=schedule.placement), 3)
        work = schedule.microbatches * virtual * (forward + backward)
        assert found.seconds_per_minibatch == pytest.approx(work + (ranks - 1) * (forward + backward))


def ones(schedule: Schedule) -> float:
    """The time of a minibatch in which no rank does anything, if every action takes one unit."""
    costs = (StageTime(1, 1, weight=1),) * schedule.workers
    found = simulate(schedule, Scenario(costs, placement=schedule.placement), 3)
    return found.seconds_per_minibatch - 6 * schedule.microbatches


def most_held(schedule: Schedule) -> int:
    """The most (worker, microbatch) pairs of which a rank holds something."""
    most = 0
    for rank in range(schedule.ranks):
        now = 0
        for _, action in schedule.row_until(rank, 1):
            now += (action.phase == "F") - (action.phase == "W")
            most = max(most, now)
    return most


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_the_papers_figures(ranks: int, more: int) -> None:
    """Bubble and memory beside those of 1F1B, in such halves of stages: 6(R − 1), and 2R on its first rank."""
    microbatches = 2 * ranks + more
    assert ones(on(ZeroBubbleV, ranks, microbatches)) == 0
    assert most_held(on(ZeroBubbleV, ranks, microbatches)) == 2 * ranks
    assert most_held(on(DualPipeV, ranks, microbatches)) <= 2 * ranks + 1
    half, least = on(VHalf, ranks, microbatches), on(VMin, ranks, microbatches)
    assert most_held(half) <= ranks + 3
    assert most_held(least) <= 2 * (ranks + 4) / 3
    assert ones(half) <= 6 * (ranks - 1) / 2 + 2
    assert ones(least) <= 6 * (ranks - 1) * 2 / 3 + 1


@given(st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-h2"]), st.data())
def test_rows_of_any_workers_can_be_merged(name: str, data: st.DataObject) -> None:
    workers, microbatches = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    ranks = data.draw(st.integers(1, workers))
    rest = data.draw(
        st.permutations([*range(1, ranks), *(data.draw(st.integers(0, ranks - 1)) for _ in range(workers - ranks))])
    )
    schedule = make(name, workers, microbatches, (0, *rest))
    report = check(schedule, 2)
    assert report.held == check(make(name, workers, microbatches), 2).held
    Versions(schedule)
    for rank in range(ranks):
        row = list(schedule.row_until(rank, 2))
        for worker in schedule.hosted(rank):
            assert [action for of, action in row if of == worker] == list(schedule.until(worker, 2))


def test_merged_rows_do_what_they_can() -> None:
    assert grid(make("gpipe", 4, 2, (0, 1, 0, 1)), 1).splitlines() == [
        "rank 0: 0:F0   0:F0.1 2:F0   2:F0.1 ..     ..     2:B0   2:B0.1 0:B0   0:B0.1",
        "rank 1: ..     1:F0   1:F0.1 3:F0   3:F0.1 3:B0   3:B0.1 1:B0   1:B0.1",
    ]


@pytest.mark.parametrize(
    ("name", "workers", "placement", "what"),
    [
        ("1f1b", 2, (1, 0), "cannot run on ranks"),
        ("1f1b", 3, (0, 2, 2), "cannot run on ranks"),
        ("1f1b", 3, (0, 1), "cannot run on ranks"),
        ("async", 4, (0, 1, 0, 1), "has one worker on each rank"),
        ("wpipe", 4, (0, 1, 1, 0), "has two workers on each rank"),
        ("wpipe", 3, (), "has two workers on each rank"),
        ("wpipe", 2, (0, 1), "has two workers on each rank"),
        ("zb-v", 4, (0, 1, 0, 1), "has its workers on ranks 0, 1, …, 1, 0"),
        ("zb-v", 3, (), "has its workers on ranks 0, 1, …, 1, 0"),
        ("interleaved", 4, (0, 1, 1, 0), "has its workers on ranks 0, 1, …, 0, 1"),
    ],
)
def test_a_placement_that_cannot_be(name: str, workers: int, placement: tuple[int, ...], what: str) -> None:
    with pytest.raises(ScheduleError, match=what):
        make(name, workers, 2, placement)


@pytest.mark.parametrize(("name", "virtual"), [("zb-v", 3), ("async", 2), ("v-min", 1)])
def test_so_many_workers_cannot_be_on_a_rank(name: str, virtual: int) -> None:
    with pytest.raises(ScheduleError, match=f"not {virtual}"):
        SCHEDULES[name].usual_placement(2, virtual)


def test_a_rank_does_only_what_is_its_own() -> None:
    class Stray(ZeroBubbleV):
        def rows(self) -> list[list[tuple[int, Action]]]:
            first, second = super().rows()
            return [first, [(0, Action("F", 0)), *second]]

    with pytest.raises(ScheduleError, match="rank 1 does F0 of worker 0, which is not on this rank") as caught:
        check(Stray(4, 2), 1)
    assert ">0:F0<" in str(caught.value)
