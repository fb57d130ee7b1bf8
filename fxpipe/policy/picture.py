"""Draws which weights every action sees under a policy and a schedule."""

from __future__ import annotations

from fxpipe.policy.base import Policy, ahead_of, lag_of
from fxpipe.schedule import Action, Schedule, Versions
from fxpipe.schedule.order import label_of, picture_of, play, read, timeline
from fxpipe.schedule.versions import versions_of


def sees(policy: Policy, schedule: Schedule, minibatches: int) -> str:
    """The schedule's grid, with the version of its worker's own weights that each action sees; see `sight_rows`.

    Raises:
        PolicyError: the policy refuses the schedule, or asks for weights that do not exist.
        ScheduleError: the schedule is unlawful or has no fixed lags.
    """
    return picture_of(schedule, sight_rows(policy, schedule, minibatches))


def sight_rows(policy: Policy, schedule: Schedule, minibatches: int) -> list[list[str]]:
    """A row of cells for each rank: its workers' actions, each with its version of own weights; `..` for waiting.

    `F3@1+2` is the forward of minibatch 3 with the weights after 1 update, predicted 2 updates ahead.

    Raises:
        PolicyError: the policy refuses the schedule, or asks for weights that do not exist.
        ScheduleError: the schedule is unlawful or has no fixed lags.
    """
    policy.check(schedule)
    versions, plain = versions_of(schedule), label_of(schedule)

    def label(worker: int, action: Action) -> str:
        version, ahead = sight(policy, versions, action, worker)
        return f"{plain(worker, action)}@{version}" + (f"+{ahead}" if ahead else "")

    return timeline(schedule, play(schedule, read(schedule, minibatches)), label)


def sight(policy: Policy, versions: Versions, action: Action, worker: int) -> tuple[int, int]:
    """The version of its own weights that `action` on `worker` reads, and how far ahead of it they are predicted.

    Raises:
        PolicyError: the policy asks for weights that do not exist.
    """
    reads = policy.read_as(action).phase, worker
    version = max(
        0, action.minibatch - lag_of(policy, versions, (action.phase, action.microbatch, worker), worker, reads)
    )
    return version, ahead_of(policy, action, version, worker, versions.schedule)
