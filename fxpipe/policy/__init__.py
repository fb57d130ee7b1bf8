"""Policies by name. Only `predict`, which this does not import, needs torch."""

from __future__ import annotations

from fxpipe.errors import PolicyError, near
from fxpipe.policy.base import Policy
from fxpipe.policy.latest import Latest
from fxpipe.policy.sees import sees
from fxpipe.policy.spectrain import SpecTrain
from fxpipe.policy.stash import Stash
from fxpipe.schedule.base import Schedule

POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (Latest, Stash, SpecTrain)}


def make(name: str) -> Policy:
    """The policy called `name`.

    Raises:
        PolicyError: no policy has this name.
    """
    if name not in POLICIES:
        raise PolicyError(f"there is no policy '{name}'{near(name, POLICIES)}", hint=f"one of: {', '.join(POLICIES)}")
    return POLICIES[name]()


def default_for(schedule: Schedule) -> str:
    """The name of the policy used when none is asked for: `spectrain` where it can be, else `latest`."""
    return Latest.name if schedule.synchronous or schedule.microbatches > 1 else SpecTrain.name


__all__ = ["POLICIES", "Latest", "Policy", "SpecTrain", "Stash", "default_for", "make", "sees"]
