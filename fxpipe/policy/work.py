"""How long a policy works on a worker's own weights for each minibatch."""

from __future__ import annotations

from functools import cache
from math import ceil

from fxpipe.plan.cost_records import PolicyTimes
from fxpipe.policy.base import Policy
from fxpipe.policy.copies import delay
from fxpipe.policy.picture import sight
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.versions import versions_of


def seconds_per_owned_byte(policy: Policy, schedule: Schedule, times: PolicyTimes) -> tuple[float, ...]:
    """Of each worker, for a minibatch: its predictions and its error feedback."""
    if schedule.synchronous:
        return (0.0,) * schedule.workers
    prediction = times.repetition if policy.weight_form else times.prediction
    return tuple(
        predictions(policy, own, worker) * prediction
        + (times.feedback if policy.ef and delay(policy, versions_of(own), worker) else 0.0)
        for worker in range(schedule.workers)
        for own in [schedule.of_worker(worker)]
    )


@cache
def predictions(policy: Policy, schedule: Schedule, worker: int) -> int:
    """How many times a worker predicts its own weights for a minibatch, in steady state; the schedule is asynchronous.

    Actions that see the same version, predicted as far, share one prediction.
    """
    versions = versions_of(schedule)
    late = 3 * ceil(schedule.filled_by / schedule.microbatches) + 4
    seen: list[set[tuple[int, int]]] = [set(), set()]
    for action in schedule.until(worker, late + 1):
        version, ahead = sight(policy, versions, action, worker)
        if ahead:
            seen[1].add((version, ahead))
            if action.minibatch < late:
                seen[0].add((version, ahead))
    return len(seen[1]) - len(seen[0])
