"""Why a worker waits, where the cause can be told.

Worker k waits for worker s, which may wait itself: the way is followed, always to whom most is waited for, until it
ends at a worker that hardly waits, or goes round between workers that wait for each other. Of those, b is the one with
the least waits. The time that k waits is then the sum of

- what b was planned to have more to do than k (uneven cuts),
- what b computes beyond its plan more than k does (slower),
- what b spends more than k on data, and on all else,
- what b waits itself. Part of that was planned (a flush, say). Of the rest, what nobody is without, what filling and
  emptying the pipeline cannot explain, and what those that wait for each other do beyond their plans cannot, only the
  link between them is left to blame for.

A cause is named where it is at least half of what k waits. Else only what was seen is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fxpipe.time_spent import BESIDES, CLEARLY, DOES, LEAST, Run, Wait, Worker


class WaitCause(NamedTuple):
    """Of one wait. Several waits with one `key` have the same cause.

    Attributes:
        cause: as `fxpipe.time_losses` names it, "wait" where it cannot be told.
        clause: what goes behind the words for the wait, with its comma or colon; empty where it cannot be told.
    """

    key: tuple[Any, ...]
    cause: str
    clause: str


def wait_cause(run: Run, worker: Worker, wait: Wait) -> WaitCause:
    """Why a worker of the run waits for another."""
    unknown = WaitCause(("wait", worker.rank, wait.source, wait.whats), "wait", "")
    if run.plans is None or wait.source not in run.workers or wait.whats[0] in ("norm", "loss"):
        return unknown
    round_trip = _followed(run, worker, wait)
    blamed = min(round_trip, key=lambda r: (run.workers[r].waiting, round_trip.index(r)))
    if round_trip == [worker.rank]:  # who it waits for waits for it
        return unknown
    least = blamed == worker.rank  # it waits less than those that it waits for
    if least:
        blamed = next(rank for rank in round_trip if rank != worker.rank)
    other, plan, own = run.workers[blamed], run.plans[blamed], run.plans[worker.rank]
    idle = min(other.waiting, worker.waiting)
    planned_idle = min(idle, run.planned_idle)
    slower, quicker = other.compute - plan.compute, own.compute - worker.compute
    causes = {"plan": planned_idle, "link": _unexplained(run, round_trip)}
    if not least:
        causes |= {kind: other.of_all(kind) - worker.of_all(kind) for kind in ("data", *BESIDES)}
        causes["update"] = (other.of_all("update") - plan.update) - (worker.of_all("update") - own.update)
        causes |= {"uneven": plan.work - own.work, "compute": slower + quicker}
    cause = max(causes, key=lambda name: causes[name])
    if causes[cause] < worker.waiting / 2:
        return unknown
    near = blamed == wait.source
    subject = ", which" if near else f": worker {blamed}"
    if cause == "uneven":
        more = f"{plan.work / own.work - 1:.0%} more" if own.work > 0 else "all"
        return WaitCause(("uneven", blamed), cause, f": worker {blamed} has {more} to do (the cuts are uneven)")
    if cause == "compute":
        if quicker > slower:
            if quicker < (CLEARLY - 1) * own.compute:
                return unknown
            return WaitCause(
                ("quick", worker.rank), cause, f": it computes {quicker / own.compute:.0%} faster than planned"
            )
        if plan.compute <= 0 or other.compute / plan.compute < CLEARLY:
            return unknown
        slow = f"{other.compute / plan.compute - 1:.0%}"
        return WaitCause(("compute", blamed), cause, f"{subject} computes {slow} slower than planned")
    if cause == "plan":
        if run.flushes:
            return WaitCause(("flush",), "flush", ": the pipeline empties after every minibatch")
        return WaitCause(("plan",), cause, ", as planned")
    if cause == "link":
        if run.flushes:  # everybody waits for everybody
            return WaitCause(("link",), cause, ": messages take longer than planned")
        if wait.whats[0] == "weights" or len(round_trip) != 2:
            return unknown
        first, second = sorted(round_trip)
        between = "them" if {first, second} == {worker.rank, wait.source} else f"workers {first} and {second}"
        return WaitCause(("link", first, second), cause, f": the link between {between} is slower than planned")
    share = other.of_all(cause) / other.seconds
    return WaitCause((cause, blamed), cause, f"{subject} spends {share:.0%} {DOES[cause]}")


def _followed(run: Run, worker: Worker, wait: Wait) -> list[int]:
    """Where the way from a worker to whom it waits for ends: one worker that hardly waits, or those of a round."""
    way: list[int] = []
    place = wait.source
    while place not in way:
        way.append(place)
        here = run.workers[place]
        known = [w for w in here.waits if w.source in run.workers and w.whats[0] not in ("norm", "loss")]
        if not known or known[0].seconds < max(LEAST * here.seconds, worker.waiting / 10):
            return [place]
        place = known[0].source
    return way[way.index(place) :]


def _unexplained(run: Run, round_trip: Sequence[int]) -> float:
    """What even the worker that waits least waits, without what was planned and what these workers may have caused."""
    ranks = list(run.workers) if run.flushes else round_trip
    least = min(worker.waiting for worker in run.workers.values())
    transient = 2 * run.way  # at most: the first microbatch's way there and back, and the last one's
    return least - run.planned_idle - transient - sum(run.excess(rank) for rank in ranks)
