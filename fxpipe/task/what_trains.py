"""Refuses code of the user that freezes or thaws parameters: compiling decides which ones are trained."""

from __future__ import annotations

import dis
from collections.abc import Collection
from types import CodeType, FunctionType

from fxpipe import user_lines
from fxpipe.errors import TaskError

AGAIN = "save a checkpoint, compile again with the new requires_grad, and go on: fxpipe run BUILD --resume CHECKPOINT"

_CALLS = ("requires_grad_", "freeze", "unfreeze")


def freezes_or_thaws(who: str, names: str, where: str | None = None) -> TaskError:
    """The code of the user that `who` names changes `requires_grad` of these parameters, which would have no effect."""
    return TaskError(
        f"{who} changes requires_grad of {names}, but compiling decides which parameters are trained",
        where=where,
        hint=AGAIN,
    )


def freezing_methods(kind: type, methods: Collection[str] | None = None) -> list[str]:
    """The methods of a class that do so, by name, of the user's own: of these, or of all that it has."""
    functions = {name: getattr(kind, name, None) for name in (dir(kind) if methods is None else methods)}
    return [
        name
        for name, function in functions.items()
        if isinstance(function, FunctionType)
        and user_lines.is_own(function.__code__.co_filename)
        and _freezes(function.__code__)
    ]


def _freezes(code: CodeType) -> bool:
    return any(
        (instruction.opname == "STORE_ATTR" and instruction.argval == "requires_grad")
        or (instruction.opname.startswith("LOAD_") and instruction.argval in _CALLS)
        for instruction in dis.get_instructions(code)
    ) or any(_freezes(inner) for inner in code.co_consts if isinstance(inner, CodeType))
