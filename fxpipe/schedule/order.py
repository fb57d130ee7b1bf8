"""The laws of a schedule, and a run of it without computing anything.

`read` returns the finite rows of a schedule and checks each worker separately; `play` runs the rows against each other,
with one unit of time per action, and finds deadlocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from textwrap import indent

from fxpipe.errors import ScheduleError
from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Schedule

IDLE = ".."
"""The cell of a unit of time without an action."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action of a run: when it ran, and the actions on other workers that it waited for."""

    worker: int
    action: Action
    time: int
    after: tuple[Event, ...]


def read(schedule: Schedule, minibatches: int, start: int = 0) -> list[list[Event]]:
    """Every rank's actions for `minibatches` minibatches from `start` on, with each worker's row checked.

    The law: every action once and no others, F before its B, B before its W if there are W, and all F, all B and all W
    in order. For messages arrive in the order of sending, the update is part of a minibatch's last action, and sums of
    gradients and buffers that forwards change must have one order. A rank does its workers' actions, each worker's in
    this order, and nothing else.

    Raises:
        ScheduleError: rows break this law; the picture marks the first offence of each worker.
    """
    count = len(schedule.phases) * schedule.microbatches * minibatches
    stop = start + minibatches
    rows = [  # at most one action too many
        list(islice(schedule.row_until(rank, stop, start), count * len(schedule.hosted(rank)) + 1))
        for rank in range(schedule.ranks)
    ]
    problems: list[str] = []
    offences: list[tuple[int, int, Event]] = []
    for rank, row in enumerate(rows):
        hosted = schedule.hosted(rank)
        places: dict[int, list[int]] = {worker: [] for worker in hosted}
        for place, (worker, action) in enumerate(row):
            if worker not in places:
                offences.append((rank, place, (worker, action)))
                problems.append(f"rank {rank} does {action} of worker {worker}, which is not on this rank")
                break
            places[worker].append(place)
        for worker in reversed(hosted):
            offence = _offence([row[place][1] for place in places[worker]], schedule, range(start, stop))
            if offence is not None:
                place, action, what = offence
                offences.append((rank, [*places[worker], len(row)][place], (worker, action)))
                problems.append(f"worker {worker} {what}")
    if problems:
        label = label_of(schedule)
        cells = [[label(*event) for event in row] for row in rows]
        for rank, place, event in offences:
            cells[rank][place : place + 1] = [marked(label(*event))]
        raise ScheduleError(_message(f"{schedule.called} is wrong", problems, picture_of(schedule, cells)))
    return rows


def _offence(row: Sequence[Action], schedule: Schedule, minibatches: range) -> tuple[int, Action, str] | None:
    """The first wrong action in a row: its place (the end if missing), the action, and the problem."""
    done: dict[Phase, set[tuple[int, int]]] = {phase: set() for phase in schedule.phases}
    latest = dict.fromkeys(schedule.phases, (minibatches.start, 0))
    before = dict(zip(schedule.phases[1:], schedule.phases, strict=False))
    for place, action in enumerate(row):
        if action.minibatch not in minibatches or action.microbatch >= schedule.microbatches:
            return place, action, f"does {action}, but there is no such microbatch"
        if action.phase not in schedule.phases:
            return place, action, f"does {action}, but its backwards make the weight gradients"
        number = action.minibatch, action.microbatch
        if number in done[action.phase]:
            return place, action, f"does {action} twice"
        if action.phase in before and number not in done[before[action.phase]]:
            return place, action, f"does {action} before {Action(before[action.phase], *number)}"
        if number < latest[action.phase]:
            return place, action, f"does {action} after {Action(action.phase, *latest[action.phase])}"
        latest[action.phase] = number
        done[action.phase].add(number)
    if len(row) == len(schedule.phases) * schedule.microbatches * len(minibatches):
        return None
    numbers = ((minibatch, microbatch) for minibatch in minibatches for microbatch in range(schedule.microbatches))
    missing = next(Action(phase, *n) for n in numbers for phase in schedule.phases if n not in done[phase])
    return len(row), missing, f"never does {missing}"


def play(
    schedule: Schedule,
    rows: Sequence[Sequence[Event]],
    needs: Callable[[int, Action], Iterable[Event]] = lambda worker, action: (),
) -> list[TimedAction]:
    """Run the ranks' rows: yield the actions in an order in which each comes after all that it depends on.

    F waits for the F of the workers before it, B for the B of the workers after it (`Schedule.graph`; in a chain these
    are the previous and the next worker), W for nothing on other workers, and all for what `needs` adds. Edges of other
    kinds add nothing: a saved value, from any worker, is older than the backward that reaches its reader. For from
    every worker there is a way to the last one, which does F before B. A worker that begins with the batch starts at
    the same time as worker 0 does. Every action starts as early as it can and takes one unit of time. Linear in the
    number of dependencies.

    Raises:
        ScheduleError: the run deadlocks; the picture marks each waiting action.
    """
    steps: list[TimedAction] = []
    finished: dict[Event, int] = {}
    waiting: dict[Event, list[int]] = defaultdict(list)
    place = [0] * len(rows)
    clock = [0] * len(rows)
    awake = list(reversed(range(len(rows))))
    while awake:
        rank = awake.pop()
        if place[rank] == len(rows[rank]):
            continue
        worker, action = rows[rank][place[rank]]
        after = (*schedule.senders(worker, action), *needs(worker, action))
        missing = next((event for event in after if event not in finished), None)
        if missing is not None:
            waiting[missing].append(rank)
            continue
        fed = action.phase == "F" and not schedule.graph[worker]  # by the beginning of worker 0's forward
        time = max([clock[rank], *(finished[event] - (fed and event == (0, action)) for event in after)])
        steps.append(TimedAction(worker, action, time, after))
        clock[rank] = finished[worker, action] = time + 1
        place[rank] += 1
        awake += [rank, *waiting.pop((worker, action), ())]
    if waiting:
        raise _deadlock(schedule, rows, place, steps, waiting)
    return steps


def timeline(schedule: Schedule, steps: Iterable[TimedAction], label: Callable[[int, Action], str]) -> list[list[str]]:
    """The rows of cells of a run, one for each rank, with one column per unit of time."""
    rows: list[list[str]] = [[] for _ in range(schedule.ranks)]
    for step in steps:
        row = rows[schedule.placement[step.worker]]
        row += [IDLE] * (step.time - len(row))
        row.append(label(step.worker, step.action))
    return rows


def label_of(schedule: Schedule) -> Callable[[int, Action], str]:
    """The label of an action in a picture of actions, with its worker if a rank has several."""
    return (lambda worker, action: f"{worker}:{action}") if schedule.several else (lambda worker, action: str(action))


def picture(rows: Sequence[Sequence[str]], of: str = "worker") -> str:
    """One line per worker or rank, with cells of the same width.

    worker 0: F0 F1 .. B0
    worker 1: .. F0 B0
    """
    width = max((len(cell) for row in rows for cell in row), default=0)
    number = len(str(len(rows) - 1))
    return "\n".join(
        f"{of} {place:>{number}}: {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for place, row in enumerate(rows)
    )


def marked(action: object) -> str:
    """The cell of an action that breaks a law: `>F3<`."""
    return f">{action}<"


def picture_of(schedule: Schedule, rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, one for each rank, as text."""
    return picture(rows, "rank" if schedule.several else "worker")


def _deadlock(
    schedule: Schedule,
    rows: Sequence[Sequence[Event]],
    place: Sequence[int],
    steps: Sequence[TimedAction],
    waiting: dict[Event, list[int]],
) -> ScheduleError:
    label = label_of(schedule)
    cells = timeline(schedule, steps, label)
    problems: list[str] = []
    for (source, event), ranks in sorted(waiting.items(), key=lambda item: item[1]):
        for rank in ranks:
            worker, stuck = rows[rank][place[rank]]
            cells[rank].append(marked(label(worker, stuck)))
            problems.append(f"worker {worker} waits at {stuck} for {event} of worker {source}")
    return ScheduleError(_message(f"{schedule.called} deadlocks", problems, picture_of(schedule, cells)))


def _message(what: str, problems: Sequence[str], grid: str) -> str:
    return f"{what}: {'; '.join(problems)}\n{indent(grid, '  ')}"
