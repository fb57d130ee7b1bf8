"""Schedules by name. Pure Python: nothing here imports torch.

action → base → gpipe, one_f_one_b, asynchronous, zero_bubble; then order (the laws, and a run in which nothing is
computed) → versions (which weights every action sees) → check (the user's verdict and picture).
"""

from __future__ import annotations

from fxpipe.errors import ScheduleError, near
from fxpipe.schedule.action import Action, parse_row
from fxpipe.schedule.asynchronous import Async
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.check import Report, check, grid
from fxpipe.schedule.gpipe import GPipe
from fxpipe.schedule.one_f_one_b import OneFOneB
from fxpipe.schedule.versions import Versions
from fxpipe.schedule.zero_bubble import ZeroBubbleH1, ZeroBubbleH2

_KINDS: tuple[type[Schedule], ...] = (GPipe, OneFOneB, Async, ZeroBubbleH1, ZeroBubbleH2)
SCHEDULES: dict[str, type[Schedule]] = {kind.name: kind for kind in _KINDS}


def kind_of(name: str) -> type[Schedule]:
    """The schedules called `name`, of any number of workers.

    Raises:
        ScheduleError: no schedule has this name.
    """
    if name not in SCHEDULES:
        raise ScheduleError(
            f"there is no schedule '{name}'{near(name, SCHEDULES)}", hint=f"one of: {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[name]


def make(name: str, workers: int, microbatches: int = 1) -> Schedule:
    """The schedule called `name`.

    Raises:
        ScheduleError: no schedule has this name, or `workers` or `microbatches` is below 1.
    """
    return kind_of(name)(workers, microbatches)


__all__ = [
    "SCHEDULES",
    "Action",
    "Async",
    "GPipe",
    "OneFOneB",
    "Report",
    "Schedule",
    "Versions",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "check",
    "grid",
    "kind_of",
    "make",
    "parse_row",
]
