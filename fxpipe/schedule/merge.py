"""Merges the rows of several workers into the row of their rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.graph import Graph

_FIRST: dict[Phase, int] = {"B": 0, "F": 1, "W": 2}


def senders(worker: int, action: Action, graph: Graph, behind: Graph) -> tuple[Event, ...]:
    """The actions of the same microbatch on other workers whose messages an action waits for; W waits for none.

    Args:
        graph, behind: for each worker, those whose F its F waits for, and those whose B its B waits for. A worker's F
            that waits for none needs the batch, which the F of worker 0 sends when it begins.
    """
    if action.phase == "F":
        return tuple((first, action) for first in graph[worker] or ((0,) if worker else ()))
    return tuple((later, action) for later in behind[worker]) if action.phase == "B" else ()


def merged(
    rows: Sequence[Sequence[Action]], placement: Sequence[int], awaited: Callable[[int, Action], Iterable[Event]]
) -> list[list[Event]]:
    """The rows of the ranks, given the rows of the workers, if every action takes one unit of time.

    A rank runs the action that can run first; of several, a backward, then a forward, then weight gradients, and in the
    same phase the later worker's. Actions that can never run, because rows deadlock, are left out.

    Args:
        awaited: the actions on other workers for which one waits.
    """
    merged_rows: list[list[Event]] = [[] for _ in range(max(placement) + 1)]
    place = [0] * len(rows)
    done: set[Event] = set()
    while True:
        now: list[Event] = []
        for rank, row in enumerate(merged_rows):
            ready = [
                (worker, rows[worker][place[worker]])
                for worker in range(len(rows))
                if placement[worker] == rank and place[worker] < len(rows[worker])
            ]
            ready = [event for event in ready if done.issuperset(awaited(*event))]
            if ready:
                chosen = min(ready, key=lambda event: (_FIRST[event[1].phase], -event[0]))
                row.append(chosen)
                now.append(chosen)
        if not now:
            return merged_rows
        for worker, _ in now:
            place[worker] += 1
        done.update(now)
