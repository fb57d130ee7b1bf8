"""Which schedules can skip the update of a minibatch whose gradients overflowed."""

from __future__ import annotations

from fxpipe.errors import ScheduleError
from fxpipe.schedule.base import Schedule

FLOAT16 = "fp16"
"""The kind of autocast whose gradients overflow, so that the loss is scaled."""


def check_loss_scaling(schedule: Schedule | type[Schedule], autocast: str | None) -> None:
    """Refuse a schedule in which a worker updates before all gradients of the minibatch exist.

    Raises:
        ScheduleError: it does, and the step computes in float16.
    """
    if autocast == FLOAT16 and not schedule.synchronous:
        raise ScheduleError(
            f"--autocast fp16 cannot be trained under schedule '{schedule.name}': a worker updates before the earlier "
            "workers' gradients of that minibatch exist, and one that overflows there could not undo its update",
            hint="--schedule 1f1b or gpipe, which update all workers at once; or --autocast bf16, which needs no scale",
        )
