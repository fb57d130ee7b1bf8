"""The result of `lr_scheduler()`: a scheduler, and when it is stepped: after every update, epoch or evaluation."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fxpipe.errors import TaskError
from fxpipe.task.callbacks import takes

STEP, EPOCH = "step", "epoch"

RETURNS = 'return a torch.optim.lr_scheduler, stepped after every update; or (scheduler, "epoch"); or None'
OF_METRIC = (
    'return (scheduler, "loss"): it is stepped after every evaluation, with that metric of metrics(model, batch)'
)
COUNTED = (
    "return an object whose step() counts and calls it with that number, and whose state_dict() and load_state_dict() "
    "keep the number: docs/how-to/epochs.md#a-scheduler-that-needs-the-epoch has one for timm's"
)
PLATEAU = "ReduceLROnPlateau"


@dataclass(frozen=True)
class PacedScheduler:
    """A user's scheduler: stepped after the last update of every epoch, if it is `per_epoch`; after every evaluation,
    with its `metric`, if it has one; else after every update."""

    scheduler: Any
    per_epoch: bool = False
    metric: str | None = None


def paced(result: Any, optimizer: Any) -> PacedScheduler | None:
    """The result of `lr_scheduler(optimizer)`: a scheduler, `(scheduler, "epoch")`, `(scheduler, "step")`, or None.

    A ReduceLROnPlateau comes with the name of a metric: `(ReduceLROnPlateau(optimizer), "loss")`.
    """
    if result is None:
        return None
    scheduler, pace = result if isinstance(result, tuple) and len(result) == 2 else (result, STEP)
    if not callable(getattr(scheduler, "step", None)):
        raise TaskError(f"lr_scheduler() returned {type(scheduler).__name__}, which has no step()", hint=RETURNS)
    bases = {base.__name__ for base in type(scheduler).__mro__}  # torch is not imported here
    if "Optimizer" in bases:
        raise TaskError("lr_scheduler() returned an optimizer, which would make every update twice", hint=RETURNS)
    if bases & {"LRScheduler", PLATEAU} and scheduler.optimizer not in (
        optimizer,
        *getattr(optimizer, "optimizers", ()),
    ):
        raise TaskError(
            "lr_scheduler() returned a scheduler of another optimizer: it would change no rate of this training",
            hint="make it for the optimizer that lr_scheduler(optimizer) is called with",
        )
    if PLATEAU in bases:
        if not isinstance(pace, str) or pace in (STEP, EPOCH):
            raise TaskError(f"lr_scheduler() returned {PLATEAU} without a metric for its steps", hint=OF_METRIC)
        return PacedScheduler(scheduler, metric=pace)
    if pace not in (STEP, EPOCH):
        raise TaskError(f"lr_scheduler() returned a scheduler for every {pace!r}", hint=RETURNS)
    if not takes(scheduler.step, 0):
        raise TaskError(
            f"{type(scheduler).__name__}.step{inspect.signature(scheduler.step)} needs an argument, and fxpipe calls "
            "step() without any",
            hint=COUNTED,
        )
    return PacedScheduler(scheduler, pace == EPOCH)


@contextmanager
def without_order_warning() -> Iterator[None]:
    """Without torch's warning that a scheduler is stepped before the optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
