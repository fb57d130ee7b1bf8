"""Refuses loss scaling with schedules that cannot skip the update of a minibatch whose gradients overflowed."""

from __future__ import annotations

from fxpipe.errors import ScheduleError
from fxpipe.schedule.base import Schedule

FLOAT16 = "fp16"
"""The kind of autocast that needs a scaled loss, because gradients overflow or vanish."""


def check_loss_scaling(schedule: Schedule | type[Schedule], autocast: str | None) -> None:
    """Refuse float16 with a schedule in which a worker updates before all gradients of the minibatch exist.

    Raises:
        ScheduleError: the step computes in float16 with such a schedule.
    """
    if autocast == FLOAT16 and not schedule.synchronous:
        raise ScheduleError(
            f"schedule '{schedule.name}' cannot train with --autocast fp16: a worker updates before the earlier "
            "workers' gradients of that minibatch exist, and could not undo its update if one of them overflows",
            hint="use --schedule 1f1b or gpipe, which update after all gradients exist, or --autocast bf16, which has "
            "no scale",
        )
