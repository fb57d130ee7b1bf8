"""`--policy`, the same for a compile and a run."""

from __future__ import annotations

from typing import Any

from fxpipe.options import option
from fxpipe.policy import POLICIES, make
from fxpipe.policy.base import Policy
from fxpipe.schedule.base import Schedule


def policy_option(default: str, **more: Any) -> Any:
    """The field of a class of options; `default` is the default in words, `more` as for `option`."""
    return option(None, "--policy", kind=_policy, metavar="NAME[+OPTION]", help=policy_help(default), **more)


def policy_help(default: str) -> str:
    """Its text in `--help`."""
    return f"Which version of the weights forwards and backwards use: latest, stash, spectrain, … [default: {default}]"


def check_policy(policy: str | Policy | None, schedule: Schedule) -> None:
    """Refuse a wrong policy early. Accepts a name that only a model file may know.

    Raises:
        PolicyError: an unknown option, or a combination that makes no sense.
    """
    if isinstance(policy, str) and policy.split("+")[0] in POLICIES:
        make(policy).check(schedule)


def _policy(text: str) -> str:
    """A policy's name with its options: `pipeoptim+keep`. A name that only the model file knows is accepted."""
    if text.split("+")[0] in POLICIES:
        make(text)
    return text
