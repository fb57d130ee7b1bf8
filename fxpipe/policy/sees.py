"""The picture of a policy under a schedule."""

from __future__ import annotations

from fxpipe.policy.base import Policy
from fxpipe.schedule import Action, Schedule, Versions, grid


def sees(policy: Policy, schedule: Schedule, minibatches: int) -> str:
    """The schedule's grid with what each pass sees of its worker's own weights.

    `F3@1+2` is the forward of minibatch 3 with the weights after 1 update, predicted 2 further.

    Raises:
        PolicyError: the policy refuses the schedule.
        ScheduleError: the schedule is unlawful or has no fixed lags.
    """
    policy.check(schedule)
    versions = Versions(schedule)

    def label(worker: int, action: Action) -> str:
        phase = "F" if policy.backward_keeps_forward else action.phase
        version = versions.version(phase, action.minibatch, reader=worker, owner=worker)
        ahead = policy.ahead(
            phase=phase, minibatch=action.minibatch, version=version, owner=worker, workers=schedule.workers
        )
        return f"{action}@{version}" + (f"+{ahead}" if ahead else "")

    return grid(schedule, minibatches, label)
