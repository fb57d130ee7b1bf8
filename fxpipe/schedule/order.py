"""The laws of a schedule, and a run of it in which nothing is computed.

`read` returns the finite rows of a schedule and checks each worker by itself; `play` runs the rows against each other,
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
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.picture import IDLE, marked, picture

Event = tuple[int, Action]  # an action on a worker
_SENDER: dict[Phase, int] = {"F": -1, "B": 1}


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action of a run: when it happened, and what on other workers it had to wait for."""

    worker: int
    action: Action
    time: int
    after: tuple[Event, ...]


def read(schedule: Schedule, minibatches: int, start: int = 0) -> list[list[Action]]:
    """Every worker's actions for `minibatches` minibatches from `start` on; each row is lawful by itself.

    The law of a row: every action once, no others, F before its B, B before its W if there are W, and the B in order,
    as the W, because the update belongs to the last of a minibatch's actions, and so that sums of gradients have one
    order.

    Raises:
        ScheduleError: rows break this law; the picture marks the first offence of each.
    """
    limit = len(schedule.phases) * schedule.microbatches * minibatches + 1  # one more than there should be
    stop = start + minibatches
    rows = [list(islice(schedule.until(worker, stop, start), limit)) for worker in range(schedule.workers)]
    problems: list[str] = []
    cells = [[str(action) for action in row] for row in rows]
    for worker, row in enumerate(rows):
        offence = _offence(row, schedule, range(start, stop))
        if offence is not None:
            place, action, what = offence
            cells[worker][place : place + 1] = [marked(action)]
            problems.append(f"worker {worker} {what}")
    if problems:
        raise ScheduleError(_message(f"schedule '{schedule.name}' is wrong", problems, cells))
    return rows


def _offence(row: Sequence[Action], schedule: Schedule, wanted: range) -> tuple[int, Action, str] | None:
    """The first offence in a row: its place (the end for a missing action), the action, what happened."""
    done: set[Action] = set()
    latest = {phase: Action(phase, wanted.start) for phase in schedule.phases}
    before = dict(zip(schedule.phases[1:], schedule.phases, strict=False))
    for place, action in enumerate(row):
        if action.minibatch not in wanted or action.microbatch >= schedule.microbatches:
            return place, action, f"does {action}, but there is no such microbatch"
        if action.phase not in schedule.phases:
            return place, action, f"does {action}, but its backwards make the weight gradients"
        if action in done:
            return place, action, f"does {action} twice"
        if action.phase in before:
            earlier, last = Action(before[action.phase], action.minibatch, action.microbatch), latest[action.phase]
            if earlier not in done:
                return place, action, f"does {action} before {earlier}"
            if (action.minibatch, action.microbatch) < (last.minibatch, last.microbatch):
                return place, action, f"does {action} after {last}"
            latest[action.phase] = action
        done.add(action)
    for minibatch in wanted:
        for microbatch in range(schedule.microbatches):
            for phase in schedule.phases:
                missing = Action(phase, minibatch, microbatch)
                if missing not in done:
                    return len(row), missing, f"never does {missing}"
    return None


def play(
    schedule: Schedule,
    rows: Sequence[Sequence[Action]],
    needs: Callable[[int, Action], Iterable[Event]] = lambda worker, action: (),
) -> list[TimedAction]:
    """Run the rows: the actions in an order in which each comes after all that it depends on.

    F waits for the F of the previous worker, B for the B of the next worker, W for nothing on other workers, and all
    for what `needs` adds. Edges of other kinds add nothing: a saved value, no matter where it was made, is older than
    the backward that reaches its reader. Every action starts as early as it can and takes one unit of time. Linear in
    the number of dependencies.

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
        worker = awake.pop()
        if place[worker] == len(rows[worker]):
            continue
        action = rows[worker][place[worker]]
        after = (*_pipeline(schedule, worker, action), *needs(worker, action))
        missing = next((event for event in after if event not in finished), None)
        if missing is not None:
            waiting[missing].append(worker)
            continue
        time = max([clock[worker], *(finished[event] for event in after)])
        steps.append(TimedAction(worker, action, time, after))
        clock[worker] = finished[worker, action] = time + 1
        place[worker] += 1
        awake += [worker, *waiting.pop((worker, action), ())]
    if waiting:
        raise _deadlock(schedule, rows, steps, waiting)
    return steps


def _pipeline(schedule: Schedule, worker: int, action: Action) -> tuple[Event, ...]:
    """The action on another worker for which the pipeline itself makes an action wait."""
    step = _SENDER.get(action.phase)
    return ((worker + step, action),) if step and 0 <= worker + step < schedule.workers else ()


def timeline(workers: int, steps: Iterable[TimedAction], label: Callable[[int, Action], str]) -> list[list[str]]:
    """The rows of cells of a run, one column per unit of time."""
    rows: list[list[str]] = [[] for _ in range(workers)]
    for step in steps:
        row = rows[step.worker]
        row += [IDLE] * (step.time - len(row))
        row.append(label(step.worker, step.action))
    return rows


def plain(worker: int, action: Action) -> str:
    """The label of an action in a picture that shows actions only."""
    return str(action)


def _deadlock(
    schedule: Schedule,
    rows: Sequence[Sequence[Action]],
    steps: Sequence[TimedAction],
    waiting: dict[Event, list[int]],
) -> ScheduleError:
    cells = timeline(schedule.workers, steps, plain)
    problems: list[str] = []
    for (sender, event), workers in sorted(waiting.items(), key=lambda item: item[1]):
        for worker in workers:
            done = sum(step.worker == worker for step in steps)
            stuck = rows[worker][done]
            cells[worker].append(marked(stuck))
            problems.append(f"worker {worker} waits at {stuck} for {event} of worker {sender}")
    return ScheduleError(_message(f"schedule '{schedule.name}' deadlocks", problems, cells))


def _message(what: str, problems: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    return f"{what}: {'; '.join(problems)}\n{indent(picture(cells), '  ')}"
