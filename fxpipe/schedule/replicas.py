"""Workers with different numbers of replicas: PipeDream's 1F1B-RR, as one schedule of all and one for each worker.

If a worker has r replicas, replica i mod r does microbatch i of the M of a minibatch. In the schedule of all, a worker
does all M in one row. Before its first backward it does enough forwards to keep all processes from its own on busy:
with replicas 2, 1, 1, worker 0 begins with 3, worker 1 with 1. Its replicas share this row, so each has

    worker 0          F0 F1 F2 F3 B0 F4 B1 F5 B2 …      the schedule of all
    worker 0, first   F0    F2    B0 F4       B2 …      in its own microbatches: F0 F1 B0 F2 B1 …
    worker 0, second     F1    F3       B1 F5    …      the same: F0 F1 B0 F2 B1 …

All replicas of a worker have the same row of their own microbatches, which is the row of `Schedule.of_worker`. A run in
processes has fewer waits than the schedule of all, and one more: an update waits for the last backwards of all
replicas. No backward waits for anything after it, so if the schedule of all has no deadlock, the run has none.

From: Narayanan et al. 2019 (PipeDream), SOSP, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, lcm

from fxpipe.errors import ScheduleError
from fxpipe.schedule.base import Schedule


def with_replicas(schedule: Schedule, replicas: Sequence[int]) -> Schedule:
    """The schedule of all, for workers with these numbers of replicas; `schedule` itself if the numbers are equal.

    Args:
        schedule: with the microbatches of the whole minibatch, if the numbers differ.

    Raises:
        ScheduleError: it cannot have different numbers of replicas, or they do not divide the microbatches.
    """
    if len(set(replicas)) < 2:
        return schedule
    numbers = ", ".join(map(str, replicas))
    if not schedule.takes_replicas or schedule.several:
        raise ScheduleError(
            f"schedule '{schedule.name}' needs the same number of replicas for each worker, not {numbers}",
            hint="use --dp R, or schedule 1f1b, gpipe or async with one worker in each process",
        )
    if len(replicas) != schedule.workers:
        raise ScheduleError(f"{numbers} are replicas of {len(replicas)} workers, and the build has {schedule.workers}")
    multiple = lcm(*replicas)
    if schedule.microbatches % multiple:
        below = schedule.microbatches // multiple * multiple
        raise ScheduleError(
            f"{schedule.microbatches} microbatches cannot be shared by {numbers} replicas",
            hint=f"use --microbatches {f'{below} or ' if below else ''}{below + multiple}, a multiple of {multiple}",
        )
    return type(schedule)(schedule.workers, schedule.microbatches, schedule.placement, tuple(replicas))


def unreceived_of_replica(schedule: Schedule, most: int) -> int:
    """As `fxpipe.schedule.check.unreceived`, for the replicas of a worker.

    Consider the forward of a later microbatch: later by `most` or more, and by a multiple of all numbers of replicas.
    It came from the same process of worker 0 as this microbatch, and that process has ended this backward by then.
    Within such a multiple, a process exchanges messages with every process that it ever sends to.

    Args:
        most: microbatches whose forward worker 0 has done and whose backward it has not, in the schedule of all.
    """
    assert schedule.replica_of is not None
    multiple = lcm(*schedule.replicas)
    return (1 + ceil(most / multiple)) * multiple // schedule.replicas[schedule.replica_of]
