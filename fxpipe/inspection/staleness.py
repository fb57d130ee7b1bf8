"""How old the weights are that forwards see, and what the policy does about it."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.inspection.formats import plural
from fxpipe.policy.base import Policy
from fxpipe.policy.costs import delay
from fxpipe.schedule.versions import Versions


@dataclass(frozen=True)
class Staleness:
    """How stale the weights are under a schedule and a policy.

    Attributes:
        updates: how many updates a forward misses at most, on any worker and in any microbatch.
        predicted: whether some forwards see predictions, which start from these weights.
        repaired: how updates correct for late gradients: 'error feedback', or ''.
    """

    updates: int
    predicted: bool
    repaired: str

    def __str__(self) -> str:
        if not self.updates:
            return "no weights are stale"
        how = ["predicted"] if self.predicted else []
        how += [f"with {self.repaired}"] if self.repaired else []
        return f"weights are at most {plural(self.updates, 'update')} old{''.join(f', {each}' for each in how)}"


def staleness_of(policy: Policy, versions: Versions) -> Staleness:
    """The staleness under a policy and the versions of a schedule, in steady state."""
    updates = max(delay(policy, versions, worker) for worker in range(versions.schedule.workers))
    return Staleness(updates, policy.predicts, " and ".join(repair.what for repair in policy.repairs))
