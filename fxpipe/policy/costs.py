"""What a policy costs each worker: copies of its own weights, and the time to compute them."""

from __future__ import annotations

from functools import cache

from fxpipe.plan.cost_records import PolicyTimes
from fxpipe.policy.base import Policy, sight
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
        remembered + _held(policy, versions, worker) + of_repairs
        for worker in range(schedule.workers)
        for versions in [own_versions(schedule.of_worker(worker), worker)]
        for of_repairs in [sum(repair.copies(delay(policy, versions, worker)) for repair in policy.repairs)]
    )


def delay(policy: Policy, versions: Versions, worker: int) -> int:
    """How many updates of its own weights a worker's forwards miss at most, in steady state."""
    microbatches = range(versions.schedule.microbatches)
    return max(policy.lag(versions, "F", microbatch, worker, worker) for microbatch in microbatches)


def _held(policy: Policy, versions: Versions, worker: int) -> int:
    """What it holds of a parameter of one byte."""
    from fxpipe.policy.held_weights import HeldInRow  # loads torch, which --help does not

    end = 3 * versions.schedule.filling + 4
    held = HeldInRow(versions.schedule, list(versions.schedule.until(worker, end)), {"": 1})
    for place, action in enumerate(held.row):
        held.read((worker, *sight(policy, versions, action, worker)), ("",), place)
    for (_, version, ahead), reads in held.reads.items():
        held.own(version, ahead, reads)
    return max(held.totals())


def seconds_per_owned_byte(policy: Policy, schedule: Schedule, times: PolicyTimes) -> tuple[float, ...]:
    """For each worker, seconds per owned byte and minibatch: of its predictions and its repairs."""
    if schedule.synchronous and not policy.predicts:
        return (0.0,) * schedule.workers
    prediction = times.repetition if policy.weight_form else times.prediction
    return tuple(
        predictions(policy, alone, worker) * prediction
        + sum(
            seconds
            for repair in policy.repairs
            for name, seconds in times.repairs
            if name == repair.name and repair.works(delay(policy, own_versions(alone, worker), worker))
        )
        for worker in range(schedule.workers)
        for alone in [schedule.of_worker(worker)]
    )


@cache
def predictions(policy: Policy, schedule: Schedule, worker: int) -> int:
    """How many times a worker predicts its own weights for a minibatch, in steady state; the schedule is asynchronous.

    Actions that see the same version, predicted equally far, share one prediction.
    """
    versions, late = own_versions(schedule, worker), 3 * schedule.filling + 4
    before, after = (
        {sight(policy, versions, action, worker) for action in versions.schedule.until(worker, end)}
        for end in (late, late + 1)
    )
    return sum(ahead > 0 for _, ahead in after) - sum(ahead > 0 for _, ahead in before)
