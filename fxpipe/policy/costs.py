"""What a policy costs each worker: copies of its own weights, and the time to compute them."""

from __future__ import annotations

from collections import Counter
from functools import cache

from fxpipe.plan.cost_records import PolicyTimes
from fxpipe.policy.base import Policy
from fxpipe.policy.picture import sight
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.versions import Versions, own_versions


@cache
def copies(policy: Policy, schedule: Schedule) -> tuple[float, ...]:
    """For each worker, the largest number of copies of its own weights at once, in addition to the live ones.

    It counts kept versions, predictions, the last update that the weight form remembers, and what repairs keep, but not
    the optimizer's own state. It follows the schedule action by action.
    """
    remembered = 1.0 if policy.weight_form else 0.0
    if schedule.synchronous and not policy.predicts:
        return (0.0,) * schedule.workers
    return tuple(
        remembered + _held(policy, versions, worker) + kept
        for worker in range(schedule.workers)
        for versions in [own_versions(schedule.of_worker(worker), worker)]
        for kept in [sum(repair.copies(delay(policy, versions, worker)) for repair in policy.repairs)]
    )


def delay(policy: Policy, versions: Versions, worker: int) -> int:
    """How many updates of its own weights a worker's forwards miss at most, in steady state."""
    microbatches = range(versions.schedule.microbatches)
    return max(policy.lag(versions, "F", microbatch, worker, worker) for microbatch in microbatches)


def _held(policy: Policy, versions: Versions, worker: int) -> int:
    schedule = versions.schedule
    row = list(schedule.until(worker, 3 * schedule.filling + 4))
    seen = [sight(policy, versions, action, worker) for action in row]
    left = Counter(seen)
    of_version: dict[int, set[tuple[int, int]]] = {}
    for key in left:
        of_version.setdefault(key[0], set()).add(key)
    held: set[tuple[int, int]] = set()
    most = live = 0
    for action, key in zip(row, seen, strict=True):
        held.add(key)
        if live:  # before the first update predictions are the live weights
            most = max(most, len(held - {(live, 0)}))
        left[key] -= 1
        if not left[key]:
            held.discard(key)
        if schedule.updated_by(action) is not None:
            held |= {key for key in of_version.get(live, ()) if left[key]}  # also those that are freed now
            live += 1
            most = max(most, len(held - {(live, 0)}))
    return most


def seconds_per_owned_byte(policy: Policy, schedule: Schedule, times: PolicyTimes) -> tuple[float, ...]:
    """For each worker, seconds per owned byte and minibatch: of its predictions and its repairs."""
    if schedule.synchronous and not policy.predicts:
        return (0.0,) * schedule.workers
    prediction = times.repetition if policy.weight_form else times.prediction
    return tuple(
        predictions(policy, own, worker) * prediction
        + sum(
            seconds
            for repair in policy.repairs
            for name, seconds in times.repairs
            if name == repair.name and repair.works(delay(policy, own_versions(own, worker), worker))
        )
        for worker in range(schedule.workers)
        for own in [schedule.of_worker(worker)]
    )


@cache
def predictions(policy: Policy, schedule: Schedule, worker: int) -> int:
    """How many times a worker predicts its own weights for a minibatch, in steady state; the schedule is asynchronous.

    Actions that see the same version, predicted equally far, share one prediction.
    """
    versions = own_versions(schedule, worker)
    late = 3 * schedule.filling + 4
    seen: list[set[tuple[int, int]]] = [set(), set()]
    for action in schedule.until(worker, late + 1):
        version, ahead = sight(policy, versions, action, worker)
        if ahead:
            seen[1].add((version, ahead))
            if action.minibatch < late:
                seen[0].add((version, ahead))
    return len(seen[1]) - len(seen[0])
