"""Which version of which weights every pass sees, counted from the schedule alone."""

from __future__ import annotations

from collections.abc import Iterable

from fxpipe.errors import ScheduleError
from fxpipe.plan import Phase
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.order import Event, Step, play, read

_PHASES: tuple[Phase, ...] = ("F", "B")


class Versions:
    """The version of each owner's weights that every action on every worker sees.

    A version is a number of updates. An action sees the owner's updates that *happen before* it: program
    order on a worker, F after the F of the worker before, B after the B of the worker behind, an update
    being part of its B. No timing enters, so every run sees the same.

    Waiting for such a version cannot deadlock, at the end of a finite run neither: the update belongs to an
    earlier minibatch, and leaving later ones out of an order without cycles makes none.

    One bound more: minibatch m never sees more than m updates. When B of m reaches worker 0, worker 1 has
    already applied m's own gradient; worker 0's replica is asked for the weights before that.

    In steady state this is a fixed lag behind the minibatch: 0 with a flush; with `async` on N workers
    N−1−min(reader, owner) for F and max(0, reader−owner) for B. On three workers, as F/B:

                   reader 0  reader 1  reader 2
        owner 0:     2/0       2/1       2/2
        owner 1:     2/0       1/0       1/1
        owner 2:     2/0       1/0       0/0

    Raises:
        ScheduleError: the schedule is unlawful or deadlocks, its lags are not fixed, or the microbatches of
            one minibatch see different versions. `async` with several does: F1 runs before the update of
            minibatch 0 and F1.1 after it; one version for both would keep the older weights (PipeDream-2BW).
    """

    def __init__(self, schedule: Schedule) -> None:
        workers = schedule.workers
        # A flush ends all that one minibatch does to the next; without one, what a run begins with takes a while to go.
        studied = range(3 if schedule.synchronous else 3 * workers + 4)
        # A finite run's last minibatches lack the later forwards that stand between them in an endless one.
        rows = read(schedule, len(studied) + (1 if schedule.synchronous else 2 * workers))
        seen = _seen(schedule, play(schedule, rows))
        last = studied[-1]
        self._lags: dict[tuple[Phase, int], tuple[int, ...]] = {
            (phase, reader): tuple(last - version for version in seen[reader, Action(phase, last)])
            for phase in _PHASES
            for reader in range(workers)
        }
        for (reader, action), versions in seen.items():
            if action.minibatch in studied:
                first = Action(action.phase, action.minibatch)
                self._same_as_first(schedule, reader, action, versions, seen[reader, first])
                self._steady(schedule, reader, action, versions)

    def lag(self, phase: Phase, reader: int, owner: int) -> int:
        """How many updates behind its minibatch a pass on `reader` sees the weights of `owner`."""
        return self._lags[phase, reader][owner]

    def version(self, phase: Phase, minibatch: int, reader: int, owner: int, start: int = 0) -> int:
        """The version that pass sees, in a run whose pipeline was empty at minibatch `start`."""
        return max(start, minibatch - self.lag(phase, reader, owner))

    def _same_as_first(
        self,
        schedule: Schedule,
        reader: int,
        action: Action,
        versions: tuple[int, ...],
        first: tuple[int, ...],
    ) -> None:
        for owner, (version, other) in enumerate(zip(versions, first, strict=True)):
            if version != other:
                raise ScheduleError(
                    f"schedule '{schedule.name}' takes one microbatch a minibatch for now: with more, {action} on "
                    f"worker {reader} sees version {version} of worker {owner}'s weights, the first one {other}",
                    hint="accumulation without a flush is not supported yet: use 1 microbatch, or 1f1b",
                )

    def _steady(self, schedule: Schedule, reader: int, action: Action, versions: tuple[int, ...]) -> None:
        for owner, version in enumerate(versions):
            steady = self.version(action.phase, action.minibatch, reader, owner)
            if version != steady:
                raise ScheduleError(
                    f"schedule '{schedule.name}' has no fixed lag: {action} on worker {reader} sees version "
                    f"{version} of worker {owner}'s weights, its lag in steady state says {steady}"
                )


def _seen(schedule: Schedule, steps: Iterable[Step]) -> dict[Event, tuple[int, ...]]:
    """Each action's version of every owner's weights, by vector clocks; steps × workers operations."""
    seen: dict[Event, tuple[int, ...]] = {}
    done: dict[Event, tuple[int, ...]] = {}
    clocks = [(0,) * schedule.workers] * schedule.workers
    for step in steps:
        worker, action = step.worker, step.action
        clock = tuple(map(max, zip(clocks[worker], *(done[event] for event in step.after), strict=True)))
        seen[worker, action] = tuple(min(updates, action.minibatch) for updates in clock)
        if action.phase == "B" and action.microbatch == schedule.microbatches - 1:
            clock = (*clock[:worker], clock[worker] + 1, *clock[worker + 1 :])
        clocks[worker] = done[worker, action] = clock
    return seen
