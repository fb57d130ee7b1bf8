"""Schedules by name. Pure Python: nothing here imports torch.

action → merge → base → gpipe, one_f_one_b, asynchronous, zero_bubble, and, with several workers on a rank,
table → interleaved, v_shaped; then replicas, order (the laws, and a run in which nothing is
computed) → versions (which weights every action sees) → check (the user's verdict and picture).
"""

from __future__ import annotations

from fxpipe.errors import ScheduleError, near
from fxpipe.plan.spec import Plan
from fxpipe.schedule.action import Action, parse_row
from fxpipe.schedule.asynchronous import Async, AsyncLate
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.check import check, grid
from fxpipe.schedule.csv_rows import ENDING, NAME, RowsOfText, from_csv, read_csv, to_csv
from fxpipe.schedule.gpipe import GPipe
from fxpipe.schedule.interleaved import Interleaved
from fxpipe.schedule.one_f_one_b import OneFOneB
from fxpipe.schedule.replicas import with_replicas
from fxpipe.schedule.v_shaped import DualPipeV, VHalf, VMin, ZeroBubbleV
from fxpipe.schedule.versions import Versions
from fxpipe.schedule.zero_bubble import ZeroBubbleH1, ZeroBubbleH2

_KINDS: tuple[type[Schedule], ...] = (
    *(GPipe, OneFOneB, Async, AsyncLate, ZeroBubbleH1, ZeroBubbleH2),
    *(Interleaved, ZeroBubbleV, VHalf, VMin, DualPipeV),
)
SCHEDULES: dict[str, type[Schedule]] = {kind.name: kind for kind in _KINDS}


def kind_of(name: str) -> type[Schedule]:
    """The schedules called `name`, of any number of workers; or that of a file or a text, as `of_text`.

    Raises:
        ScheduleError: no schedule has this name, or the text is wrong.
    """
    if (made := of_text(name)) is not None:
        return type(made)
    if name not in SCHEDULES:
        raise ScheduleError(
            f"there is no schedule '{name}'{near(name, SCHEDULES)}", hint=f"one of: {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[name]


def make(name: str, workers: int, microbatches: int = 1, placement: tuple[int, ...] = ()) -> Schedule:
    """The schedule called `name`.

    Args:
        placement: the rank of each worker; empty stands for the schedule's usual one.

    Raises:
        ScheduleError: no schedule has this name, or it cannot have so many workers or microbatches, there.
    """
    return kind_of(name)(workers, microbatches, placement)


def of_text(text: str) -> RowsOfText | None:
    """The schedule in a file (`….csv`), or the text of one; None for the name of a schedule.

    Raises:
        ScheduleError: as `read_csv`.
    """
    return read_csv(text) if text.endswith(ENDING) else from_csv(text) if "," in text else None


def schedule_text(text: str) -> str:
    """How `--schedule` is read: a name; or the text of what is in a file, so that no process has to find it again.

    Builds that were made with a file call theirs 'csv', a name for these alone: see `of_plan`.

    Raises:
        ScheduleError: there is no such schedule, or the file is wrong.
    """
    if text == NAME:
        return text
    made = of_text(text)
    return kind_of(text).name if made is None else to_csv(made)


def of_plan(plan: Plan, name: str | None = None) -> Schedule:
    """The schedule of a plan, or another one for its workers: of the pipeline of one replica, where these are equally
    many; else of all.

    Args:
        name: a name, a file (`….csv`), or the text of one.

    Raises:
        ScheduleError: there is no such schedule, or it is for other workers, ranks or microbatches, or not for
            workers with different numbers of replicas.
    """
    if name is None or name == plan.schedule:
        made = from_csv("\n".join(plan.rows), "the plan's schedule") if plan.rows else None
    else:
        made = of_text(name)
    placement = plan.placement or tuple(range(plan.workers))
    if made is None:
        named = make(name or plan.schedule, plan.workers, plan.own_microbatches, placement)
        return with_replicas(named, plan.replicas)
    with_replicas(made, plan.replicas)
    for what, found, wanted in (
        ("ranks", made.ranks, plan.ranks),
        ("stages", made.workers, plan.workers),
        ("microbatches", made.microbatches, plan.own_microbatches),
    ):
        if found != wanted:
            raise ScheduleError(
                f"the schedule is for {found} {what}, the build has {wanted}",
                hint="compile the model for it: fxpipe compile MODEL --schedule FILE.csv",
            )
    if made.placement != placement:
        raise ScheduleError(
            f"the schedule has its stages on ranks {list(made.placement)}, the build on {list(placement)}",
            hint="compile the model for it: fxpipe compile MODEL --schedule FILE.csv",
        )
    return made


__all__ = [
    "SCHEDULES",
    "Action",
    "Async",
    "AsyncLate",
    "DualPipeV",
    "GPipe",
    "Interleaved",
    "OneFOneB",
    "Schedule",
    "VHalf",
    "VMin",
    "Versions",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "check",
    "from_csv",
    "grid",
    "kind_of",
    "make",
    "of_plan",
    "of_text",
    "parse_row",
    "read_csv",
    "schedule_text",
    "to_csv",
    "with_replicas",
]
