"""The verdict on a schedule, and its picture, without computing anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.order import label_of, picture_of, play, read, timeline
from fxpipe.schedule.replicas import unreceived_of_replica


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        in_flight: for each worker, the largest number of microbatches whose F is done and whose B is not.
        held: the same, until the last action of each microbatch: a worker holds saved values of that many. Without
            actions W, it is `in_flight`.
    """

    in_flight: tuple[int, ...]
    held: tuple[int, ...]


def check(schedule: Schedule, minibatches: int, start: int = 0) -> Report:
    """Prove that the schedule of `minibatches` minibatches from `start` on obeys the laws and runs to its end.

    Every worker does every action once, F before its B, B before its W, each phase in order, and nothing deadlocks.
    Linear in the number of actions.

    Raises:
        ScheduleError: the schedule breaks a law; the picture in the message marks the wrong actions: `>F3<`.
    """
    rows = read(schedule, minibatches, start)
    play(schedule, rows)
    counts = [list(_counts(schedule, _of(worker, rows[rank]))) for worker, rank in enumerate(schedule.placement)]
    return Report(
        in_flight=tuple(max(waiting for waiting, _ in pairs) for pairs in counts),
        held=tuple(max(map(sum, pairs)) for pairs in counts),
    )


def held(schedule: Schedule) -> tuple[int, ...]:
    """For each worker, the most microbatches whose F is done and whose last action is not, with a full pipeline."""
    of_workers = [schedule.of_worker(worker) for worker in range(schedule.workers)]
    return tuple(max(map(sum, _counts(of, of.until(worker, _full(of))))) for worker, of in enumerate(of_workers))


@cache
def unreceived(schedule: Schedule) -> int:
    """After how many more of its own forwards a worker knows that an action's messages were all received."""
    if schedule.replica_of is not None:
        whole = schedule.of_all
        most = max(waiting for waiting, _ in _counts(whole, whole.until(0, _full(whole))))
        return unreceived_of_replica(schedule, most)
    report = check(schedule, 2 if schedule.synchronous else 2 * schedule.filled_by + 2)
    # A worker that has ended B of a microbatch has ended W of the one that many earlier. In a chain, worker 0's B is
    # the last of all. In another graph, a worker learns of a B on a branch next to its own where the branches meet: the
    # next F there comes after that B, and all workers' next B after that F.
    rounds = 2 if schedule.after else 1
    return rounds * max(report.in_flight) + (max(report.held) if schedule.weights_apart else 0)


def unread(schedule: Schedule) -> int:
    """The same for blocks of weight copies, which later microbatches read: no reader's lag is longer."""
    return unreceived(schedule) + (2 if schedule.after else 1) * schedule.workers * schedule.microbatches


def _of(worker: int, row: Iterable[Event]) -> list[Action]:
    return [action for of, action in row if of == worker]


def _fullest(schedule: Schedule) -> list[tuple[int, int]]:
    """For each worker, the microbatches between F and B, and between B and W, when its rank holds most."""
    fullest = [(0, 0)] * schedule.workers
    for rank in range(schedule.ranks):
        row = list(schedule.row_until(rank, _full(schedule)))
        walks = {worker: _counts(schedule, _of(worker, row)) for worker in schedule.hosted(rank)}
        now, most = {worker: next(walk) for worker, walk in walks.items()}, 0
        for worker, _ in row:
            now[worker] = next(walks[worker])
            if (total := sum(map(sum, now.values()))) > most:
                most = total
                for of, counts in now.items():
                    fullest[of] = counts
    return fullest


def _counts(schedule: Schedule, row: Iterable[Action]) -> Iterator[tuple[int, int]]:
    """How many microbatches are between F and B, and between B and W: before a worker's first action and after each."""
    waiting = later = 0
    yield waiting, later
    for action in row:
        waiting += (action.phase == "F") - (action.phase == "B")
        later += ((action.phase == "B") - (action.phase == "W")) * schedule.weights_apart
        yield waiting, later


def moments(schedule: Schedule, worker: int) -> tuple[tuple[int, int], ...]:
    """How many microbatches a worker has between F and B, and between B and W, at its fullest moments.

    These are the moments that no other moment exceeds in both numbers. Without actions W, the second number is 0. If
    the worker shares its rank, it is the moment when the rank holds most.
    """
    if schedule.several:
        return (_fullest(schedule)[worker],)
    schedule = schedule.of_worker(worker)
    counts = set(_counts(schedule, schedule.until(worker, _full(schedule))))
    return tuple(sorted(m for m in counts if not any(m[0] <= n[0] and m[1] <= n[1] for n in counts - {m})))


def grid(schedule: Schedule, minibatches: int) -> str:
    """The picture of a run from an empty pipeline to an empty pipeline; each action takes one unit of time.

        worker 0: F0 F1 .. B0 .. B1
        worker 1: .. F0 B0 F1 B1

    A rank with several workers has one row: `rank 0: 0:F0 1:F0 .. 1:B0 0:B0`.

    Raises:
        ScheduleError: like `check`.
    """
    steps = play(schedule, read(schedule, minibatches))
    return picture_of(schedule, timeline(schedule, steps, label_of(schedule)))


def _full(schedule: Schedule) -> int:
    """How many minibatches a run needs to have filled the pipeline."""
    return 1 if schedule.synchronous else schedule.filled_by + 1
