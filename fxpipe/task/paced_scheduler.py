"""What `lr_scheduler()` returns: a scheduler, and whether it makes a step after every update or after every epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxpipe.errors import TaskError

STEP, EPOCH = "step", "epoch"

RETURNS = 'return a torch.optim.lr_scheduler, which makes a step after every update; or (scheduler, "epoch"); or None'


@dataclass(frozen=True)
class PacedScheduler:
    """A user's scheduler; `per_epoch` ones make a step after the last update of every epoch, others after each."""

    scheduler: Any
    per_epoch: bool = False


def paced(made: Any) -> PacedScheduler | None:
    """What `lr_scheduler()` has returned: a scheduler, `(scheduler, "epoch")`, `(scheduler, "step")`, or None.

    Raises:
        TaskError: it is something else.
    """
    if made is None:
        return None
    scheduler, pace = made if isinstance(made, tuple) and len(made) == 2 else (made, STEP)
    if not callable(getattr(scheduler, "step", None)):
        raise TaskError(f"lr_scheduler() returned {type(scheduler).__name__}, which has no step()", hint=RETURNS)
    if pace not in (STEP, EPOCH):
        raise TaskError(f"lr_scheduler() returned a scheduler for every {pace!r}", hint=RETURNS)
    return PacedScheduler(scheduler, pace == EPOCH)
