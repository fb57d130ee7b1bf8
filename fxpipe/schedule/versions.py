"""The versions of weights that every action sees, computed from the schedule alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from fxpipe.errors import ScheduleError
from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.order import TimedAction, play, read


class Versions:
    """The version of each owner's weights that every action on every worker sees.

    A version is a number of updates. An action sees the owner's updates that *happen before* it: by program order on a
    worker, F after the F of the workers before it, B after the B of the workers after it (`Schedule.graph`, mostly a
    chain); an update is part of the action that ends its minibatch. Timing plays no part, so every run sees the same.

    A schedule with a flush adds one more order: a worker's actions of a minibatch come after all workers' updates of
    the minibatch before. If updates are part of B, the pipeline's messages enforce this. If they are part of W, which
    sends no message, an action waits for the weights that it reads.

    Waiting for such a version cannot deadlock, not even at the end of a finite run: the update belongs to an earlier
    minibatch, and an order without cycles stays so when later minibatches are left out.

    There is one more bound: minibatch m never sees more than m updates. When B of m reaches worker 0, worker 1 has
    already applied m's own gradient; worker 0's weight copy must have the weights before that.

    In steady state this is a fixed lag: 0 with a flush; with `async` on N workers N−1−min(reader, owner) for F and
    max(0, reader−owner) for B. On three workers, as F/B:

                   reader 0  reader 1  reader 2
        owner 0:     2/0       2/1       2/2
        owner 1:     2/0       1/0       1/1
        owner 2:     2/0       1/0       0/0

    With several microbatches per minibatch and no flush, the microbatches of one minibatch see different versions: with
    M of them, worker k's F of microbatch j sees version m − ⌈(N−1−k−j)/M⌉ of its own weights. PipeDream-2BW's delay of
    one is the case M ≥ N−1. So a lag belongs to a microbatch.

    If updates are late by a minibatch, as with `async-late`, each lag is one update more, except for a B on a worker
    before the owner, where the bound already decides.

    Raises:
        ScheduleError: the schedule breaks a law or deadlocks, or its lags are not fixed.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        workers, microbatches = schedule.workers, schedule.microbatches
        # After a flush a minibatch has no effect on the next; without one, the start has an effect for a while.
        studied = range(3 if schedule.synchronous else 3 * schedule.filling + 4)
        # The last minibatches of a finite run lack the later forwards that an endless run has between them.
        rows = read(schedule, len(studied) + (1 if schedule.synchronous else 2 * schedule.filling))
        seen = _seen(schedule, play(schedule, rows, _flush(schedule, rows)))
        last = studied[-1]
        self._lags: dict[tuple[Phase, int, int], tuple[int, ...]] = {
            (phase, microbatch, reader): tuple(
                last - version for version in seen[reader, Action(phase, last, microbatch)]
            )
            for phase in schedule.phases
            for microbatch in range(microbatches)
            for reader in range(workers)
        }
        for (reader, action), versions in seen.items():
            if action.minibatch in studied:
                self._steady(schedule, reader, action, versions)

    def lag(self, phase: Phase, reader: int, owner: int, microbatch: int = 0) -> int:
        """How many updates late a microbatch sees the weights of `owner` in a phase on `reader`."""
        return self._lags[self.schedule.runs_in(phase), microbatch, reader][owner]

    def version(self, action: Action, reader: int, owner: int, start: int = 0) -> int:
        """The version that `action` on `reader` sees, in a run whose pipeline was empty at minibatch `start`."""
        return max(start, action.minibatch - self.lag(action.phase, reader, owner, action.microbatch))

    def _steady(self, schedule: Schedule, reader: int, action: Action, versions: tuple[int, ...]) -> None:
        lags = self._lags[action.phase, action.microbatch, reader]
        steady = tuple([max(0, action.minibatch - lag) for lag in lags])
        for owner, (version, other) in enumerate(zip(versions, steady, strict=True) if versions != steady else ()):
            if version != other:
                raise _not_fixed(schedule, (reader, action), owner, version, other)


class OwnVersions(Versions):
    """Versions for questions about one worker and its own weights, which its row alone answers: much faster.

    Raises:
        ScheduleError: its lags are not fixed.
    """

    def __init__(self, schedule: Schedule, worker: int) -> None:
        self.schedule, self.worker = schedule, worker
        last = 2 if schedule.synchronous else 3 * schedule.filling + 3
        updates, seen = 0, dict[Action, int]()
        for action in schedule.until(worker, last + 1):
            seen[action] = min(updates, action.minibatch)
            updates += schedule.updated_by(action) is not None
        self._own_lags = {
            (action.phase, action.microbatch): last - version
            for action, version in seen.items()
            if action.minibatch == last
        }
        for action, version in seen.items():
            steady = max(0, action.minibatch - self._own_lags[action.phase, action.microbatch])
            if version != steady:
                raise _not_fixed(schedule, (worker, action), worker, version, steady)

    def lag(self, phase: Phase, reader: int, owner: int, microbatch: int = 0) -> int:
        if reader == owner == self.worker:
            return self._own_lags[self.schedule.runs_in(phase), microbatch]
        return versions_of(self.schedule).lag(phase, reader, owner, microbatch)


def _not_fixed(schedule: Schedule, event: Event, owner: int, version: int, steady: int) -> ScheduleError:
    reader, action = event
    return ScheduleError(
        f"schedule '{schedule.name}' has no fixed lag: {action} on worker {reader} sees version {version} of worker "
        f"{owner}'s weights, but by its lag in steady state it would see {steady}"
    )


@lru_cache(maxsize=64)
def own_versions(schedule: Schedule, worker: int) -> OwnVersions:
    """Those of a worker, computed once."""
    return OwnVersions(schedule, worker)


@lru_cache(maxsize=16)
def versions_of(schedule: Schedule) -> Versions:
    """The versions of a schedule, computed once: 64 workers with 64 microbatches take a second."""
    return Versions(schedule)


@lru_cache(maxsize=64)
def most_missed(schedule: Schedule) -> int:
    """How many updates of its own weights the forwards of any worker miss at most, in steady state."""
    versions = [own_versions(schedule.of_worker(worker), worker) for worker in range(schedule.workers)]
    return max(v.lag("F", v.worker, v.worker, j) for v in versions for j in range(v.schedule.microbatches))


def _flush(schedule: Schedule, rows: Sequence[Sequence[Event]]) -> Callable[[int, Action], Iterable[Event]]:
    """What each worker's first action of a minibatch waits for under a flush: all updates of the minibatch before."""
    if not schedule.synchronous:
        return lambda worker, action: ()
    first: dict[tuple[int, int], Action] = {}
    for row in rows:
        for worker, action in row:
            first.setdefault((worker, action.minibatch), action)

    def needs(worker: int, action: Action) -> list[Event]:
        if action.minibatch == 0 or first[worker, action.minibatch] != action:
            return []
        return [(other, schedule.update_of(action.minibatch - 1)) for other in range(schedule.workers)]

    return needs


def _seen(schedule: Schedule, steps: Iterable[TimedAction]) -> dict[Event, tuple[int, ...]]:
    """Each action's version of every owner's weights, by vector clocks; actions × workers operations."""
    seen: dict[Event, tuple[int, ...]] = {}
    done: dict[Event, tuple[int, ...]] = {}
    clocks = [(0,) * schedule.workers] * schedule.workers
    for step in steps:
        worker, action = step.worker, step.action
        clock = clocks[worker]
        for other in (done[event] for event in step.after):
            if other is not clock:  # most are the same: only an update makes a new one
                clock = tuple(map(max, clock, other))
        newest = action.minibatch
        seen[worker, action] = clock if max(clock) <= newest else tuple([min(v, newest) for v in clock])
        if schedule.updated_by(action) is not None:
            clock = (*clock[:worker], clock[worker] + 1, *clock[worker + 1 :])
        clocks[worker] = done[worker, action] = clock
    return seen
