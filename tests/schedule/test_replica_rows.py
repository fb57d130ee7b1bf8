"""Rows of workers with different numbers of replicas: shared out, each once, and without a deadlock."""

from __future__ import annotations

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import ScheduleError
from fxpipe.schedule import SCHEDULES, Schedule, check, make, with_replicas
from fxpipe.schedule.action import Action
from fxpipe.schedule.check import held, unreceived

COUNTS = st.lists(st.integers(1, 3), min_size=2, max_size=4).filter(lambda counts: len(set(counts)) > 1)
NAMES = st.sampled_from([name for name, kind in SCHEDULES.items() if kind.takes_replicas])
Seat = tuple[int, int]


def made(name: str, counts: list[int], times: int) -> Schedule:
    return with_replicas(make(name, len(counts), times * lcm(*counts)), counts)


def rows(schedule: Schedule, minibatches: int) -> dict[Seat, list[Action]]:
    """What every process does, by worker and replica, with the numbers of microbatches in the whole minibatch."""
    return {
        (worker, replica): [
            Action(action.phase, action.minibatch, action.microbatch * count + replica)
            for action in schedule.of_worker(worker).until(worker, minibatches)
        ]
        for worker, count in enumerate(schedule.replicas)
        for replica in range(count)
    }


def test_picture() -> None:
    found = {seat: " ".join(map(str, row)) for seat, row in rows(made("1f1b", [2, 1, 1], 2), 1).items()}
    assert found == {
        (0, 0): "F0 F0.2 B0 B0.2",
        (0, 1): "F0.1 F0.3 B0.1 B0.3",
        (1, 0): "F0 F0.1 B0 F0.2 B0.1 F0.3 B0.2 B0.3",
        (2, 0): "F0 B0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3",
    }
    assert held(made("1f1b", [2, 1, 1], 2)) == (2, 2, 1)


@given(NAMES, COUNTS, st.integers(1, 4))
def test_processes_share_the_row_of_their_worker(name: str, counts: list[int], times: int) -> None:
    """Every microbatch once in the replica that is its own, in the order of the schedule of all, which is lawful."""
    schedule = made(name, counts, times)
    check(schedule, 3)
    found = rows(schedule, 3)
    for worker, count in enumerate(counts):
        whole = list(schedule.until(worker, 3))
        for replica in range(count):
            assert found[worker, replica] == [a for a in whole if a.microbatch % count == replica]
    for worker, count in enumerate(counts):
        check(schedule.of_worker(worker), 3)
        assert held(schedule)[worker] <= -(-sum(counts[worker:]) // count) or name == "gpipe"


@given(NAMES, COUNTS, st.integers(1, 4))
def test_no_deadlock_where_updates_wait_for_all_replicas(name: str, counts: list[int], times: int) -> None:
    """Played process by process: what is left waiting at the end would wait for ever.

    And when a process has done so many forwards more, all that it sent has been received: by then the receiver has
    done what it was for.
    """
    schedule = made(name, counts, times)
    minibatches = 4
    found = rows(schedule, minibatches)
    place = dict.fromkeys(found, 0)
    done: set[tuple[int, Action]] = set()
    order: list[tuple[Seat, Action]] = []
    last = schedule.microbatches - 1

    def ended(worker: int, minibatch: int) -> bool:
        return all((worker, Action("B", minibatch, last - j)) in done for j in range(counts[worker]))

    moved = True
    while moved:
        moved = False
        for (worker, replica), row in found.items():
            while place[worker, replica] < len(row):
                action = row[place[worker, replica]]
                before = row[place[worker, replica] - 1] if place[worker, replica] else None
                updated = before and before.phase == "B" and before.microbatch > last - counts[worker]
                if before and updated and not ended(worker, before.minibatch):
                    break
                if not done.issuperset(schedule.senders(worker, action)):
                    break
                done.add((worker, action))
                order.append(((worker, replica), action))
                place[worker, replica] += 1
                moved = True
    assert all(place[seat] == len(row) for seat, row in found.items())
    _check_received(schedule, counts, order)


def _check_received(schedule: Schedule, counts: list[int], order: list[tuple[Seat, Action]]) -> None:
    """Before a process ends forward n + `unreceived`, its neighbours have done forward and backward of microbatch n."""
    when = {(seat[0], action): time for time, (seat, action) in enumerate(order)}
    forwards: dict[Seat, list[Action]] = {}
    for seat, action in order:
        if action.phase == "F":
            forwards.setdefault(seat, []).append(action)
    for (worker, _), own in forwards.items():
        later = unreceived(schedule.of_worker(worker))
        for sent, action in zip(own, own[later:], strict=False):
            for other in range(len(counts)):
                backward = Action("B", sent.minibatch, sent.microbatch)
                assert when[other, backward] < when[worker, action]


def test_equal_numbers_are_one_pipeline() -> None:
    plain = make("1f1b", 3, 4)
    assert with_replicas(plain, (2, 2, 2)) is plain
    assert plain.of_worker(1) is plain


def test_refusals() -> None:
    with pytest.raises(ScheduleError, match="4 microbatches cannot be shared by 3, 1 replicas") as refused:
        with_replicas(make("1f1b", 2, 4), (3, 1))
    assert "--microbatches 3 or 6" in str(refused.value.hint)
    for name in ("zb-h1", "interleaved", "zb-v"):
        with pytest.raises(ScheduleError, match="the same number of replicas for each worker, not 2, 1"):
            with_replicas(make(name, 2, 4), (2, 1))
    with pytest.raises(ScheduleError, match="replicas of 3 workers, and the build has 2"):
        with_replicas(make("1f1b", 2, 4), (2, 1, 1))
