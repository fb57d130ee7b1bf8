"""Where a run's pipeline is empty: a run is made in segments, of which each begins and ends with an empty pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.errors import ScheduleError
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Schedule


@dataclass(frozen=True)
class Segments:
    """The first `single` minibatches of a run have a segment each; the rest of it has one, unless a caller flushes.

    A segment of one minibatch is that minibatch under a flush: all its actions read the weights after the updates of
    all minibatches before it, and no others; its last action ends with its update. With `async` its order is that of
    `1f1b`. Here single = 2:

        worker 0: F0 .. .. B0 F1 .. .. B1 F2 F3 .. B2 F4 B3 ..
        worker 1: .. F0 B0 .. .. F1 B1 .. .. F2 B2 F3 B3 F4 ..
    """

    single: int = 0

    @staticmethod
    def of(steps: int, schedule: Schedule) -> Segments:
        """Those of a run whose first `steps` steps are synchronous.

        Raises:
            ScheduleError: there cannot be so many, or all steps of the schedule are synchronous.
        """
        if steps < 0:
            raise ScheduleError(f"a run cannot begin with {steps} synchronous steps", hint="sync_steps of 0 or more")
        if steps and schedule.synchronous:
            raise ScheduleError(
                f"all steps are synchronous with schedule '{schedule.name}', not only the first {steps}",
                hint="leave out --sync-steps, or train with --schedule async",
            )
        return Segments(steps)

    def is_single(self, minibatch: int) -> bool:
        """Whether a minibatch has a segment of its own: nothing in it is late."""
        return minibatch < self.single

    def begins(self, minibatch: int, start: int) -> int:
        """The first minibatch of the segment of `minibatch`, if a caller's last flush was before `start`."""
        return minibatch if self.is_single(minibatch) else max(start, self.single)

    def updated_by(self, schedule: Schedule, action: Action, start: int) -> int | None:
        """The minibatch whose update is part of an action, as `Schedule.updated_by`."""
        if self.is_single(action.minibatch):
            return action.minibatch if schedule.ends(action) else None
        return schedule.updated_by(action, self.begins(action.minibatch, start))

    def actions(self, schedule: Schedule, worker: int, start: int = 0) -> Iterator[Action]:
        """The endless row of a worker, as `Schedule.actions`."""
        for minibatch in range(start, self.single):
            yield from schedule.until(worker, minibatch + 1, minibatch)
        yield from schedule.actions(worker, max(start, self.single))

    def after(
        self, schedule: Schedule, worker: int, step: int, start: int, stop: int | None = None
    ) -> Iterator[Action]:
        """The rest of a row that began with minibatch `start`: what it has of the minibatches from `step` on.

        They come in the row's own order, which a pipeline that fills again must keep: `actions` begins some minibatches
        earlier, where no effect of its start is left.
        """
        begin = _again(schedule, step, start)
        row = self.actions(schedule, worker, begin) if stop is None else self.until(schedule, worker, stop, begin)
        return (action for action in row if action.minibatch >= step)

    def until(self, schedule: Schedule, worker: int, stop: int, start: int = 0) -> Iterator[Action]:
        """The row of minibatches [start, stop), as `Schedule.until`."""
        for minibatch in range(start, min(stop, self.single)):
            yield from schedule.until(worker, minibatch + 1, minibatch)
        yield from schedule.until(worker, stop, max(start, self.single))

    def row_after(self, schedule: Schedule, rank: int, step: int, start: int, stop: int) -> Iterator[Event]:
        """The rest of a rank's row, as `after`."""
        row = self.row_until(schedule, rank, stop, _again(schedule, step, start))
        return (event for event in row if event[1].minibatch >= step)

    def row_until(self, schedule: Schedule, rank: int, stop: int, start: int = 0) -> Iterator[Event]:
        """The row of a rank with minibatches [start, stop), as `Schedule.row_until`."""
        for minibatch in range(start, min(stop, self.single)):
            yield from schedule.row_until(rank, minibatch + 1, minibatch)
        yield from schedule.row_until(rank, stop, max(start, self.single))


def _again(schedule: Schedule, step: int, start: int) -> int:
    """Where a row that began with minibatch `start` begins again, to be what it was from minibatch `step` on."""
    settled = 3 * -(-schedule.filled_by // schedule.microbatches) + 4  # as `Versions` studies it
    return max(start, step - settled)
