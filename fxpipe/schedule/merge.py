"""Merges the rows of several workers into the row of their rank."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action, Event

SENDER: dict[Phase, int] = {"F": -1, "B": 1}
"""The worker whose action of the same microbatch an action waits for, relative to its own; W waits for none."""

_FIRST: dict[Phase, int] = {"B": 0, "F": 1, "W": 2}


def sender(worker: int, action: Action, workers: int) -> Event | None:
    """The action on another worker whose message an action waits for; None if there is none."""
    step = SENDER.get(action.phase)
    return (worker + step, action) if step and 0 <= worker + step < workers else None


def merged(rows: Sequence[Sequence[Action]], placement: Sequence[int]) -> list[list[Event]]:
    """The rows of the ranks, given the rows of the workers, if every action takes one unit of time.

    A rank runs the action that can run first; of several, a backward, then a forward, then weight gradients, and in the
    same phase the later worker's. Actions that can never run, because rows deadlock, are left out.
    """
    found: list[list[Event]] = [[] for _ in range(max(placement) + 1)]
    place = [0] * len(rows)
    done: set[Event] = set()
    while True:
        now: list[Event] = []
        for rank, row in enumerate(found):
            ready = [
                (worker, rows[worker][place[worker]])
                for worker in range(len(rows))
                if placement[worker] == rank and place[worker] < len(rows[worker])
            ]
            ready = [event for event in ready if (of := sender(*event, len(rows))) is None or of in done]
            if ready:
                chosen = min(ready, key=lambda event: (_FIRST[event[1].phase], -event[0]))
                row.append(chosen)
                now.append(chosen)
        if not now:
            return found
        for worker, _ in now:
            place[worker] += 1
        done.update(now)
