"""`--policy`, the same for `compile`, `plan` and `run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from fxpipe.policy import POLICIES, make
from fxpipe.policy.base import Policy
from fxpipe.schedule import make as make_schedule


class PolicyText(click.ParamType):
    """A policy's name with its options: `pipeoptim+keep`. A name that only the model file knows is let through."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text.split("+")[0] in POLICIES:
            make(text)
        return text


def check_policy(policy: str | Policy | None, schedule: str, workers: int, microbatches: int) -> None:
    """Refuse before anything long begins what makes no sense. A name that nobody knows yet is left to the model file.

    Raises:
        ScheduleError, PolicyError: an unknown schedule or option, or a combination that makes no sense.
    """
    made = make_schedule(schedule, workers, microbatches)
    if isinstance(policy, str) and policy.split("+")[0] in POLICIES:
        make(policy).check(made)


def policy_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option; `default` says what holds without it."""
    return click.option(
        "--policy",
        type=PolicyText(),
        metavar="NAME[+OPTION]",
        help=f"Which weights a pass sees: {', '.join(sorted(POLICIES))}, or the model file's own; with switches behind "
        f"it: pipeoptim+keep, spectrain+decay. [default: {default}]",
    )
