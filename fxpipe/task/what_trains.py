"""The error where the user's code freezes or thaws parameters: which ones are trained is decided when compiling."""

from __future__ import annotations

from fxpipe.errors import TaskError

AGAIN = (
    "save a checkpoint, compile again with requires_grad as it is to be from there on, and go on: "
    "fxpipe run BUILD --resume CHECKPOINT"
)


def freezes_or_thaws(who: str, names: str, where: str | None = None) -> TaskError:
    """Code changes `requires_grad` of these parameters, and nothing would come of it.

    Args:
        who: what the user calls the code.
    """
    return TaskError(
        f"{who} changes requires_grad of {names}, and which parameters are trained is decided when compiling",
        where=where,
        hint=AGAIN,
    )
