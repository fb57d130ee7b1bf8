"""The events of one row, up to a limit that moves: feeding moves it further, an early end nearer.

own loop:  fed 0, 1, 2, … minibatches; the end is unknown ── flush ─→ the end is what was fed
run:       all are fed, up to a minibatch that waits for an evaluation; patience or a callback ─→ an earlier end
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.runtime.wires.one_process import Turns
from fxpipe.schedule.action import Event
from fxpipe.schedule.base import Schedule


@dataclass
class Limit:
    """How far the rows of a process go.

    Attributes:
        fed: no minibatch from this one on may begin yet.
        end: no minibatch from this one on will follow; None while that is unknown.
    """

    fed: int
    end: int | None = None


class LimitedRow:
    """The events of a rank, or of one of its replicas, from a minibatch on, as far as its limit allows.

    With a known end it is the endless row without later minibatches, up to the last action of those before, as in
    `Schedule.until`.

    Args:
        start: where the row began with an empty pipeline: at `step`, or before the checkpoint of that step.
        turns: in which it waits for its limit to move.
    """

    def __init__(
        self, schedule: Schedule, rank: int, limit: Limit, turns: Turns, step: int = 0, start: int = 0
    ) -> None:
        self._limit, self._turns, self._ends = limit, turns, schedule.ends
        self._workers = len(schedule.hosted(rank))
        self._events: Iterator[Event] = schedule.row_after(rank, step, start)
        self._upcoming = next(self._events)
        self._ended = step * self._workers  # minibatches of its workers that are over when all given actions are

    def next(self) -> Event | None:
        """The next event; None at the row's end, or where the limit holds it."""
        end = self._limit.end
        while end is not None and not self._over and self._upcoming[1].minibatch >= end:
            self._upcoming = next(self._events)
        if self._over or self._upcoming[1].minibatch >= self._limit.fed:
            return None
        event, self._upcoming = self._upcoming, next(self._events)
        self._ended += self._ends(event[1])
        return event

    def more(self) -> bool:
        """Call when all events so far are done: wait until the limit has moved, and return whether there are more."""
        limit, upcoming = self._limit, self._upcoming[1].minibatch
        self._turns.wait(lambda: limit.end is not None or upcoming < limit.fed, lambda: "the next batch", idle=True)
        return not self._over

    @property
    def _over(self) -> bool:
        return self._limit.end is not None and self._ended >= self._limit.end * self._workers
