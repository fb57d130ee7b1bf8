"""Whether cuts of their own for forward and backward are worth what they move between workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fxpipe.planner.device import BUSES
from fxpipe.planner.links import GLOO_LOOPBACK, NCCL_NODE, Links
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import Profile
from fxpipe.planner.quantity import size

WORTH = 0.02
"""How much faster distinct forward and backward cuts must be than shared ones to be worth their messages."""

ASSUMED, MEASURED = 1 / 3, 0.9
"""The share of an assumed bandwidth at which they must still be that, and of a measured one at which they may not lose:
links may be slower."""

Plan = TypeVar("Plan")


def worth_messages(
    separate: Plan, same: Plan, time: Callable[[Plan, Links], float], links: Links, noise: float
) -> bool:
    """Whether separate cuts gain more than the noise of the measured times, and gain over slower links too.

    Args:
        time: of a plan over links, in any unit.
    """
    assumed = links in (GLOO_LOOPBACK, NCCL_NODE, *BUSES.values())
    slower = (links.slower(ASSUMED), WORTH) if assumed else (links.slower(MEASURED), 0.0)
    least = ((links, max(WORTH, noise)), slower)
    return all(_gain(time(separate, over), time(same, over)) > enough for over, enough in least)


def why_shared(compared: Sequence[Partition], profile: Profile) -> str:
    """Why forward and backward share cuts although separate ones are faster; '' if they are not.

    Args:
        compared: partitions, the chosen one last.
    """
    *others, chosen = compared
    fastest = min(others, key=_time, default=chosen)
    noise, gain = profile.noise(len(chosen.loads)), _gain(_time(fastest), _time(chosen))
    if chosen.mode != "same" or gain <= WORTH:
        return ""
    doubt = "but not over slower links" if gain > noise else f"within the noise of the measured times ({noise:.0%})"
    return f"separate ones would gain {gain:.1%}{moved_text(fastest.moved - chosen.moved)}, {doubt}"


def moved_text(more: float) -> str:
    """` for 25.3 GiB a minibatch more between workers`; '' for nothing."""
    return f" for {size(abs(more))} a minibatch {'more' if more > 0 else 'less'} between workers" if more else ""


def _time(partition: Partition) -> float:
    return partition.simulated or partition.bottleneck


def _gain(separate: float, same: float) -> float:
    return 1 - separate / same if same else 0.0
