"""Schedules by name. Pure Python: nothing here imports torch.

action → graph → merge → base → with_flush, asynchronous, n_f_one_b, and, with several workers on a rank, table →
interleaved, v_shaped, wpipe; then replicas, order (the laws, and a run without computing anything) → versions (the
weights that every action sees) → check (the verdict and the picture for users).
"""

from __future__ import annotations

from itertools import islice
from typing import TypeVar

from fxpipe.errors import ScheduleError, near
from fxpipe.plan.plan import Plan
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.asynchronous import Async, AsyncLate
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.check import check, grid
from fxpipe.schedule.csv_rows import ENDING, NAME, EndlessRows, RowsOfText, endless, from_csv, read_csv, to_csv
from fxpipe.schedule.graph import graph_of_edges
from fxpipe.schedule.interleaved import Interleaved
from fxpipe.schedule.n_f_one_b import NForwardsOneBackward
from fxpipe.schedule.replicas import with_replicas
from fxpipe.schedule.v_shaped import DualPipeV, VHalf, VMin, ZeroBubbleV
from fxpipe.schedule.versions import Versions
from fxpipe.schedule.with_flush import GPipe, OneFOneB, ZeroBubbleH1, ZeroBubbleH2
from fxpipe.schedule.wpipe import WPipe

_KINDS: tuple[type[Schedule], ...] = (
    *(GPipe, OneFOneB, Async, AsyncLate, NForwardsOneBackward, ZeroBubbleH1, ZeroBubbleH2),
    *(Interleaved, WPipe, ZeroBubbleV, VHalf, VMin, DualPipeV),
)
SCHEDULES: dict[str, type[Schedule]] = {kind.name: kind for kind in _KINDS}
_WORDS = (NAME, "auto")
"""What `--schedule` accepts in addition to names of schedules."""

_Kind = TypeVar("_Kind", bound=type[Schedule])


def register(kind: _Kind) -> _Kind:
    """A class decorator: from now on, `--schedule` knows this schedule by its name, and a search tries it.

    In a model file, a compile knows it, with a flush or without. Its order of actions is written into the plan, so what
    reads the build knows it without importing the file.

    Raises:
        ScheduleError: it has no name, or one that fxpipe uses; or its updates are late.
    """
    name = getattr(kind, "name", "")
    if not isinstance(name, str) or not _is_name(name):
        raise ScheduleError(f"{kind.__name__} has no name", hint='name: ClassVar[str] = "…", of letters, digits and -')
    if name in _WORDS or (name in SCHEDULES and _is_own(SCHEDULES[name])):
        raise ScheduleError(f"there is already a schedule '{name}'", hint=f"give {kind.__name__} another name")
    if kind.late or not isinstance(getattr(kind, "synchronous", None), bool):
        raise ScheduleError(
            f"schedule '{name}' {'makes updates late' if kind.late else 'does not say whether it has a flush'}",
            hint="set synchronous: ClassVar[bool] = True, with all updates before the next minibatch's first forward; "
            "or False; and late = 0",
        )
    SCHEDULES[name] = kind
    return kind


def _is_name(text: str) -> bool:
    """Whether a text may be the name of a schedule, of fxpipe or of a model file."""
    return bool(text) and text.replace("-", "").replace("_", "").isalnum()


def _is_own(kind: type[Schedule]) -> bool:
    return kind.__module__.startswith(f"{__name__}.")


def lines_of(schedule: Schedule) -> tuple[str, ...]:
    """The rows that a plan stores; none for fxpipe's own schedules, whose names are enough.

    Raises:
        ScheduleError: the rows of a registered schedule are wrong, or its code raises an error.
    """
    if isinstance(schedule, RowsOfText | EndlessRows):
        return schedule.lines
    return () if _is_own(type(schedule)) else _checked(schedule).lines


def _checked(schedule: Schedule) -> RowsOfText | EndlessRows:
    """A registered schedule as text, checked by the laws."""
    named = f"schedule '{schedule.name}' of {schedule.workers} workers and {schedule.microbatches} microbatches"
    try:
        rows = from_csv(to_csv(schedule), named, schedule.name) if schedule.synchronous else endless(schedule)
    except ScheduleError:
        raise
    except Exception as error:
        where = f"{type(schedule).__module__}.{type(schedule).__name__}"
        raise ScheduleError(f"{named} raised {type(error).__name__}: {error}", where=where) from error
    sizes = (schedule.workers, schedule.microbatches, schedule.placement)
    if (rows.workers, rows.microbatches, rows.placement) != sizes:
        raise ScheduleError(f"{named} has rows of {rows.workers} workers and {rows.microbatches} microbatches")
    if schedule.synchronous and any(_first(schedule, rank) != _first(rows, rank) for rank in range(rows.ranks)):
        raise ScheduleError(
            f"{named} does not repeat what it does in its first minibatch, one minibatch after the other",
            hint="synchronous = True promises that; a schedule that begins a minibatch earlier has synchronous = False",
        )
    return rows


def _first(schedule: Schedule, rank: int) -> list[Event]:
    """The events of a rank in the time of three minibatches with a flush."""
    events = len(schedule.phases) * schedule.microbatches * len(schedule.hosted(rank))
    return list(islice(schedule.row(rank), 3 * events))


def kind_of(name: str) -> type[Schedule]:
    """The schedule class called `name`, for any number of workers; or the schedule in a file or a text, as `of_text`.

    Raises:
        ScheduleError: no schedule has this name, or the text is wrong.
    """
    if (schedule := of_text(name)) is not None:
        return type(schedule)
    if name not in SCHEDULES:
        raise ScheduleError(
            f"there is no schedule '{name}'{near(name, SCHEDULES)}",
            hint=f"give one of: {', '.join(SCHEDULES)}; or, for a compile, one that the model file registers: a run "
            "knows only fxpipe's and its build's",
        )
    return SCHEDULES[name]


def make(name: str, workers: int, microbatches: int = 1, placement: tuple[int, ...] = ()) -> Schedule:
    """The schedule called `name`.

    Args:
        placement: the rank of each worker; empty means the schedule's usual placement.

    Raises:
        ScheduleError: no schedule has this name, or it cannot have this number of workers or microbatches, or this
            placement.
    """
    schedule = kind_of(name)(workers, microbatches, placement)
    if not _is_own(type(schedule)):
        checked = _checked(schedule)
        return schedule if schedule.synchronous else checked  # which knows how far it runs ahead
    return schedule


def of_text(text: str) -> RowsOfText | EndlessRows | None:
    """The schedule in a file (`….csv`), or the text of one; None for the name of a schedule.

    Raises:
        ScheduleError: as `read_csv`.
    """
    return read_csv(text) if text.endswith(ENDING) else from_csv(text) if "," in text else None


def schedule_text(text: str) -> str:
    """Read `--schedule`: a name, or the contents of a file, so that other processes need not find the file.

    Builds that were made with a file call their schedule 'csv', a name only for them: see `of_plan`. Accepts a name
    that only a model file may know.

    Raises:
        ScheduleError: there is no such schedule, or the file is wrong.
    """
    schedule = of_text(text)
    if schedule is None and text not in SCHEDULES and not _is_name(text):
        kind_of(text)
    return text if schedule is None else to_csv(schedule)


def of_plan(plan: Plan, name: str | None = None) -> Schedule:
    """The schedule of a plan, or another one for its workers. If all workers have equally many replicas, it is the
    schedule of one replica's pipeline; else of all. Its workers have the graph that the plan's edges enforce.

    Args:
        name: a name, a file (`….csv`), or the text of one.

    Raises:
        ScheduleError: there is no such schedule, or it is for other numbers of workers, ranks or microbatches, or not
            for workers with different numbers of replicas.
    """
    if name is None or name == plan.schedule:
        schedule = from_csv("\n".join(plan.rows), "the plan's schedule", plan.schedule) if plan.rows else None
    else:
        schedule = of_text(name)
    placement = plan.placement or tuple(range(plan.workers))
    graph = graph_of_edges(plan.edges, plan.workers)
    if schedule is None:
        named = make(name or plan.schedule, plan.workers, plan.own_microbatches, placement)
        return with_replicas(named, plan.replicas).along(graph)
    with_replicas(schedule, plan.replicas)
    for what, count, planned in (
        ("ranks", schedule.ranks, plan.ranks),
        ("stages", schedule.workers, plan.workers),
        ("microbatches", schedule.microbatches, plan.own_microbatches),
    ):
        if count != planned:
            raise ScheduleError(
                f"the schedule is for {count} {what}, the build has {planned}",
                hint="compile the model for it: fxpipe compile MODEL --schedule FILE.csv",
            )
    if schedule.placement != placement:
        raise ScheduleError(
            f"the schedule has its stages on ranks {list(schedule.placement)}, the build has them on {list(placement)}",
            hint="compile the model for it: fxpipe compile MODEL --schedule FILE.csv",
        )
    return schedule.along(graph)


__all__ = [
    "SCHEDULES",
    "Action",
    "Async",
    "AsyncLate",
    "OneFOneB",
    "Schedule",
    "Versions",
    "check",
    "from_csv",
    "grid",
    "kind_of",
    "lines_of",
    "make",
    "of_plan",
    "of_text",
    "read_csv",
    "register",
    "schedule_text",
    "to_csv",
    "with_replicas",
]
