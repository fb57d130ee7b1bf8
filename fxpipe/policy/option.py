"""`--policy`, the same for a compile and a run."""

from __future__ import annotations

from typing import Any

from fxpipe.options import option
from fxpipe.policy import POLICIES, make


def policy_option(default: str) -> Any:
    """The field of a class of options; `default` says what holds without it."""
    return option(
        None,
        "--policy",
        kind=_policy,
        metavar="NAME[+OPTION]",
        help=f"Which weights a pass sees: {', '.join(sorted(POLICIES))}, or the model file's own; with switches behind "
        f"it: pipeoptim+keep, spectrain+decay. [default: {default}]",
    )


def _policy(text: str) -> str:
    """A policy's name with its options: `pipeoptim+keep`. A name that only the model file knows is let through."""
    if text.split("+")[0] in POLICIES:
        make(text)
    return text
