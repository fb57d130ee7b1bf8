"""What happens between two actions while workers train: callbacks, checkpoints, evaluations, in this order.

    on_step → checkpoint → evaluation → on_eval → on_epoch

A checkpoint is cut before what follows from the evaluation of its step: whoever goes on from it hears of that again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.run_callbacks import RunCallbacks
from fxpipe.runtime.worker.executor import Executor


def between_actions(
    acted: Sequence[Executor],
    here: Sequence[Executor],
    callbacks: RunCallbacks | None,
    checkpoints: Checkpoints | None,
    evaluate: Callable[[], None],
    rates_follow: bool,
) -> None:
    """Do what is due on some workers; checkpoints before which nothing is decided follow by themselves.

    Args:
        acted: these, all at the same version.
        here: all workers of this process: an evaluation may have held some of them.
        evaluate: evaluates, if that is due.
        rates_follow: an evaluation changes learning rates.
    """
    if callbacks is not None:
        for executor in acted:
            callbacks.stepped(executor)
    if checkpoints is not None and (rates_follow or (callbacks is not None and callbacks.follows)):
        checkpoints.between(acted)
    evaluate()
    if callbacks is not None:
        for executor in here:
            callbacks.epoch_over(executor)
