"""The error if the user's code freezes or unfreezes parameters: compiling decides which ones are trained."""

from __future__ import annotations

from fxpipe.errors import TaskError

AGAIN = "save a checkpoint, compile again with the new requires_grad, and go on: fxpipe run BUILD --resume CHECKPOINT"


def freezes_or_thaws(who: str, names: str, where: str | None = None) -> TaskError:
    """Code changes `requires_grad` of these parameters, which would have no effect.

    Args:
        who: what the user calls the code.
    """
    return TaskError(
        f"{who} changes requires_grad of {names}, but compiling decides which parameters are trained",
        where=where,
        hint=AGAIN,
    )
