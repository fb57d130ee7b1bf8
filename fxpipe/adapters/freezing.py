"""Methods that freeze or thaw parameters while a trainer trains: a pipeline calls none, so they are refused."""

from __future__ import annotations

import dis
from collections.abc import Collection
from types import CodeType, FunctionType

from fxpipe.tracing import user_lines

_CALLS = ("requires_grad_", "freeze", "unfreeze")


def freezing(kind: type, methods: Collection[str] | None = None) -> list[str]:
    """Those of a class, by name, that are the user's own: of these, or of all that it has."""
    found = {name: getattr(kind, name, None) for name in (dir(kind) if methods is None else methods)}
    return [
        name
        for name, function in found.items()
        if isinstance(function, FunctionType)
        and user_lines.is_own(function.__code__.co_filename)
        and _freezes(function.__code__)
    ]


def _freezes(code: CodeType) -> bool:
    return any(
        (each.opname == "STORE_ATTR" and each.argval == "requires_grad")
        or (each.opname.startswith("LOAD_") and each.argval in _CALLS)
        for each in dis.get_instructions(code)
    ) or any(_freezes(inner) for inner in code.co_consts if isinstance(inner, CodeType))
