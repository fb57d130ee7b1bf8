"""What policies need of the optimizer where each replica of a worker has its own share of it (`--shard optimizer`)."""

from __future__ import annotations

from fxpipe.errors import PolicyError
from fxpipe.policy.base import Policy


def check_shares(policy: Policy) -> None:
    """Refuse a policy that asks the optimizer about all parameters of a worker.

    Raises:
        PolicyError: it predicts weights, or repairs steps.
    """
    if policy.predicts:
        what = "predicts weights, for which every replica needs the velocity of every parameter"
    elif policy.ef:
        what = "repairs the steps of late gradients, for which it follows the optimizer from step to step"
    else:
        return
    raise PolicyError(
        f"policy '{policy}' {what}; with --shard optimizer each has that of its own share alone",
        hint="policy latest or stash, a synchronous schedule, or compile without --shard",
    )
