"""Each schedule is the picture that stands in its docstring, and lawful."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from textwrap import indent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_schedule import row_of

from fxpipe.errors import ScheduleError
from fxpipe.schedule import (
    SCHEDULES,
    Action,
    Async,
    AsyncLate,
    GPipe,
    NForwardsOneBackward,
    OneFOneB,
    Schedule,
    ZeroBubbleH1,
    ZeroBubbleH2,
    check,
    grid,
    make,
)
from fxpipe.schedule.check import held


def on_ranks(name: str, ranks: int, microbatches: int) -> Schedule:
    """With as many workers on each rank as the schedule is made for."""
    return make(name, ranks * SCHEDULES[name].usual_virtual, microbatches)


schedules = st.builds(on_ranks, st.sampled_from(list(SCHEDULES)), st.integers(1, 7), st.integers(1, 6))


@pytest.mark.parametrize(
    ("schedule", "minibatches"),
    [
        (GPipe(workers=3, microbatches=2), 2),
        (OneFOneB(workers=3, microbatches=4), 1),
        (Async(workers=3), 5),
        (AsyncLate(workers=3), 5),
        (NForwardsOneBackward(workers=3, microbatches=2), 4),
        (ZeroBubbleH1(workers=3, microbatches=4), 1),
        (ZeroBubbleH2(workers=3, microbatches=6), 1),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_picture_stands_in_the_docstring(schedule: Schedule, minibatches: int) -> None:
    assert indent(grid(schedule, minibatches), "    ") in (inspect.getdoc(type(schedule)) or "")


def test_nf1b_with_one_microbatch_is_async() -> None:
    for worker in range(4):
        assert [*make("nf1b", 4).until(worker, 6)] == [*Async(4).until(worker, 6)]


@given(schedules, st.integers(1, 9), st.integers(0, 100))
def test_every_schedule_is_lawful_from_any_start(schedule: Schedule, minibatches: int, start: int) -> None:
    check(schedule, minibatches, start)


@given(st.integers(1, 8), st.integers(1, 12))
def test_how_many_microbatches_are_in_flight(workers: int, microbatches: int) -> None:
    assert check(GPipe(workers, microbatches), 2).in_flight == (microbatches,) * workers
    kept = tuple(min(microbatches, workers - k) for k in range(workers))
    assert check(OneFOneB(workers, microbatches), 2).in_flight == kept
    assert check(Async(workers), workers).in_flight == tuple(workers - k for k in range(workers))
    nf1b, hop = NForwardsOneBackward(workers, microbatches), min(2, microbatches)
    kept = tuple(microbatches + hop * (workers - 1 - k) for k in range(workers))
    assert check(nf1b, nf1b.filling + 1).in_flight == held(nf1b) == kept


@given(st.sampled_from(["gpipe", "1f1b", "async", "nf1b"]), st.integers(1, 6), st.integers(1, 6))
def test_without_w_a_worker_holds_what_is_in_flight(name: str, workers: int, microbatches: int) -> None:
    report = check(make(name, workers, microbatches), workers)
    assert report.held == report.in_flight


@given(st.sampled_from([ZeroBubbleH1, ZeroBubbleH2]), st.integers(1, 8), st.integers(1, 16))
def test_how_many_microbatches_zero_bubble_holds(
    kind: type[ZeroBubbleH1 | ZeroBubbleH2], workers: int, microbatches: int
) -> None:
    """The paper: as many on every worker as 1F1B on its first, or twice as many less one."""
    report = check(kind(workers, microbatches), 2)
    ahead = [kind.depth * (workers - 1 - k) + 1 for k in range(workers)]
    assert report.in_flight == tuple(min(microbatches, a) for a in ahead)
    assert report.held == (min(microbatches, kind.depth * (workers - 1) + 1),) * workers
    assert held(kind(workers, microbatches)) == report.held


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 2), (2, 5), (3, 3), (4, 8), (4, 13)])
def test_zb_h1_is_torchs_zb1p(workers: int, microbatches: int) -> None:
    made = pytest.importorskip("torch.distributed.pipelining.schedules")
    for rank in range(workers):
        ahead = min(microbatches, workers - 1 - rank)
        operations = made._get_1f1b_rank_ops(
            *(1, workers, ahead, microbatches - ahead, ahead, rank),
            *(lambda _, rank=rank: rank,) * 2,
            num_1f1b_microbatches=rank,
            enable_zero_bubble=True,
        )
        names = [str(operation).removeprefix(str(rank)) for operation in operations if operation is not None]
        assert names == [
            f"{'I' if a.phase == 'B' else a.phase}{a.microbatch}"
            for a in ZeroBubbleH1(workers, microbatches).until(rank, 1)
        ]


@given(schedules, st.integers(0, 5), st.integers(0, 5))
def test_until_is_the_endless_schedule_without_later_minibatches(
    schedule: Schedule, start: int, minibatches: int
) -> None:
    stop = start + minibatches
    for worker in range(schedule.workers):
        endless = islice(schedule.actions(worker, start), 3 * schedule.microbatches * (minibatches + schedule.workers))
        assert list(schedule.until(worker, stop, start)) == [a for a in endless if a.minibatch < stop]


def test_until_gives_up_on_a_backward_that_never_comes() -> None:
    class Forgets(Schedule):
        name = "forgets"
        synchronous = False

        def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
            yield from (a for a in islice(Async(1).actions(0, start), 100) if str(a) != "B1")
            pytest.fail("until still asks for more")

    assert list(Forgets(1).until(0, 2)) == row_of("F0 B0 F1")


@pytest.mark.parametrize(("workers", "microbatches", "what"), [(0, 1, "workers"), (2, 0, "microbatches")])
def test_a_schedule_of_nothing_is_refused(workers: int, microbatches: int, what: str) -> None:
    with pytest.raises(ScheduleError, match=f"at least 1 of {what}, not 0"):
        make("1f1b", workers, microbatches)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ScheduleError, match="no schedule 'asink', did you mean 'async'"):
        make("asink", 2)


def test_importing_schedules_and_policies_does_not_import_torch() -> None:
    code = "import sys, fxpipe.schedule, fxpipe.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
