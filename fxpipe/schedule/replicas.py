"""Workers with different numbers of replicas: PipeDream's 1F1B-RR, as one schedule of all and one for each worker.

Microbatch i of the M of a minibatch is done by replica i mod r of a worker that has r. In the schedule of all, a worker
does all M in one row, with as many forwards before its first backward as keep the processes from its own on busy: of
replicas 2, 1, 1, worker 0 begins with 3, worker 1 with 1. Its replicas share that row, so each has

    worker 0          F0 F1 F2 F3 B0 F4 B1 F5 B2 …      the schedule of all
    worker 0, first   F0    F2    B0 F4       B2 …      written in its own microbatches: F0 F1 B0 F2 B1 …
    worker 0, second     F1    F3       B1 F5    …      likewise F0 F1 B0 F2 B1 …

All replicas of a worker have one row of their own microbatches, which is that of `Schedule.of_worker`. What runs in
processes leaves out waits from the schedule of all, and adds one: an update waits for the last backwards of all
replicas. None of them waits for what a replica does after its own: so there is no deadlock where that has none.

From: Narayanan et al. 2019 (PipeDream), SOSP, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, lcm

from fxpipe.errors import ScheduleError
from fxpipe.schedule.base import Schedule


def with_replicas(schedule: Schedule, replicas: Sequence[int]) -> Schedule:
    """The schedule of all, for workers with these numbers of replicas; the same one if they are equally many.

    Args:
        schedule: with the microbatches of the whole minibatch, if the numbers differ.

    Raises:
        ScheduleError: it is none for replicas, or they do not divide the microbatches.
    """
    if len(set(replicas)) < 2:
        return schedule
    numbers = ", ".join(map(str, replicas))
    if not schedule.takes_replicas or schedule.several:
        raise ScheduleError(
            f"schedule '{schedule.name}' is for workers with equally many replicas, not {numbers}",
            hint="--dp R, or schedule 1f1b, gpipe or async with one worker in each process",
        )
    if len(replicas) != schedule.workers:
        raise ScheduleError(f"{numbers} are the replicas of {len(replicas)} workers, there are {schedule.workers}")
    multiple = lcm(*replicas)
    if schedule.microbatches % multiple:
        below = schedule.microbatches // multiple * multiple
        raise ScheduleError(
            f"{schedule.microbatches} microbatches cannot be shared by {numbers} replicas",
            hint=f"--microbatches {f'{below} or ' if below else ''}{below + multiple}: a multiple of {multiple}",
        )
    return type(schedule)(schedule.workers, schedule.microbatches, schedule.placement, tuple(replicas))


def unreceived_of_replica(schedule: Schedule, most: int) -> int:
    """As `fxpipe.schedule.check.unreceived`, for the replicas of a worker.

    Whoever does the forward of a microbatch `most` or more later, a multiple of all numbers of replicas, got it from
    the process of worker 0 that did this one, too, which by then has ended its backward. And within such a multiple a
    process has to do with every other one that it sends anything.

    Args:
        most: microbatches whose forward worker 0 has done and whose backward it has not, in the schedule of all.
    """
    assert schedule.replica_of is not None
    multiple = lcm(*schedule.replicas)
    return (1 + ceil(most / multiple)) * multiple // schedule.replicas[schedule.replica_of]
