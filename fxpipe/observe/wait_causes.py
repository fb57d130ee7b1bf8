"""Finds out why a worker waits, if the cause can be known.

Part of a wait was planned: other workers have more to do (uneven cuts), a flush, links. If that is nearly all of it,
that is the cause. Else we look for the cause of the rest.

Worker k waits for worker s, which may wait itself. We follow the path, always to the worker that is waited for most,
until it ends at a worker that hardly waits, or goes in a circle of workers that wait for each other. Of those, b is the
one that waits least. What k waits beyond the plan is then the sum of

- how much more than k it takes beyond its plan: for computing, predictions and sends, and for updates,
- how much more than k it spends on data, and on everything else,
- how long b itself waits beyond the plan. Part of that all workers wait, and neither filling and emptying the pipeline
  nor the work of those that wait for each other explains it: then only the link between them can be the cause.

A cause is named if it is at least half of the sum. Else only what was seen is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fxpipe.observe.time_spent import CLEARLY, DOES, LEAST, TimedRun, TimedWorker, Wait


class WaitCause(NamedTuple):
    """The cause of a wait. Waits with the same `key` have the same cause.

    Attributes:
        cause: as `fxpipe.observe.time_losses` names it, "wait" if it is not known.
        clause: the text after the words for the wait, with its comma or colon; empty if the cause is not known.
    """

    key: tuple[Any, ...]
    cause: str
    clause: str


AS_PLANNED = 0.9
"""The least planned share of a wait for the wait to be called planned."""


def wait_cause(run: TimedRun, worker: TimedWorker, wait: Wait) -> WaitCause:
    """Why a worker of the run waits for another."""
    unknown = WaitCause(("wait", worker.rank, wait.source, wait.whats), "wait", "")
    if run.plans is None or wait.source not in run.workers or wait.whats[0] in ("norm", "overflow", "loss", "sum"):
        return unknown
    round_trip = _followed(run, worker, wait)
    blamed = min(round_trip, key=lambda r: (run.workers[r].waiting, round_trip.index(r)))
    if run.flushes:  # every worker waits for every other
        blamed = max(run.workers, key=lambda r: (run.excess(r), r == blamed))
    uneven = run.uneven(worker.rank)
    left = worker.waiting - uneven - run.planned_idle
    if left <= (1 - AS_PLANNED) * worker.waiting:
        return _planned(run, worker, blamed, uneven)
    said = _planned_part(run, worker, wait)
    unknown = unknown._replace(clause=said)
    least = blamed == worker.rank  # it waits less than those that it waits for
    if least:
        blamed = next((rank for rank in round_trip if rank != worker.rank), wait.source)
    other, plan, own = run.took[blamed], run.plans[blamed], run.plans[worker.rank]
    mine = run.took[worker.rank]
    slower, quicker = other.compute - plan.compute, own.compute - mine.compute
    causes = {"link": _unexplained(run, round_trip)}
    if not least:
        causes |= {kind: run.spends(blamed, kind) - run.spends(worker.rank, kind) for kind in run.besides}
        causes |= {"update": (other.update - plan.update) - (mine.update - own.update), "compute": slower + quicker}
    cause = max(causes, key=lambda name: causes[name])
    if causes[cause] < left / 2:
        return unknown
    if cause == "link":
        return _link(run, worker, wait, round_trip, said) or unknown
    subject = ", which" if blamed == wait.source and not said else f": worker {blamed}"
    if cause == "compute":
        if quicker > slower:
            if quicker < (CLEARLY - 1) * own.compute:
                return unknown
            why = f"{said}: it computes {quicker / own.compute:.0%} faster than planned"
            return WaitCause(("quick", worker.rank), cause, why)
        if plan.compute <= 0 or other.compute / plan.compute < CLEARLY:
            return unknown
        cause = run.reason(blamed) or cause
        if cause == "compute":
            slow = f"{other.compute / plan.compute - 1:.0%}"
            return WaitCause((cause, blamed), cause, f"{said}{subject} computes {slow} slower than planned")
    spent = run.workers[blamed].of_all(cause) / run.workers[blamed].seconds
    return WaitCause((cause, blamed), cause, f"{said}{subject} spends {spent:.0%} {DOES[cause]}")


def _planned(run: TimedRun, worker: TimedWorker, blamed: int, uneven: float) -> WaitCause:
    """The cause of a wait that was planned."""
    assert run.plans is not None
    if uneven > run.planned_idle:
        most = max(plan.busy for plan in run.plans.values())
        if run.plans[blamed].busy < 0.99 * most:
            blamed = next(rank for rank, plan in run.plans.items() if plan.busy == most)
        plan, own = run.plans[blamed], run.plans[worker.rank]
        more = f"{plan.busy / own.busy - 1:.0%} more" if own.busy > 0 else "all"
        copies = plan.copy - own.copy > (plan.busy - own.busy) / 2
        why = "it copies more messages" if copies else "the cuts are uneven"
        return WaitCause(("uneven", blamed), "uneven", f": worker {blamed} has {more} to do ({why})")
    if run.flushes:
        return WaitCause(("flush",), "flush", ": the pipeline empties after every minibatch")
    return WaitCause(("plan",), "plan", ", as planned")


def _planned_part(run: TimedRun, worker: TimedWorker, wait: Wait) -> str:
    """The share of its time that the plan has for such a wait, if that is large enough to mention."""
    part = wait.seconds / worker.waiting
    share, planned = wait.seconds / worker.seconds, run.planned_share(worker.rank) * part
    return f", {planned:.0%} planned" if max(LEAST, share / 10) <= planned < share - LEAST / 2 else ""


def _link(run: TimedRun, worker: TimedWorker, wait: Wait, round_trip: Sequence[int], said: str) -> WaitCause | None:
    if run.flushes:  # every worker waits for every other
        return WaitCause(("link",), "link", f"{said}: messages take longer than planned")
    if wait.whats[0] == "weights" or len(round_trip) != 2:
        return None
    first, second = sorted(round_trip)
    between = "them" if {first, second} == {worker.rank, wait.source} else f"workers {first} and {second}"
    return WaitCause(("link", first, second), "link", f"{said}: the link between {between} is slower than planned")


def _followed(run: TimedRun, worker: TimedWorker, wait: Wait) -> list[int]:
    """Where the path from a worker to those it waits for ends: one worker that hardly waits, or the workers of a
    circle."""
    way: list[int] = []
    place = wait.source
    while place not in way:
        way.append(place)
        here = run.workers[place]
        known = [
            w for w in here.waits if w.source in run.workers and w.whats[0] not in ("norm", "overflow", "loss", "sum")
        ]
        if not known or known[0].seconds < max(LEAST * here.seconds, worker.waiting / 10):
            return [place]
        place = known[0].source
    return way[way.index(place) :]


def _unexplained(run: TimedRun, round_trip: Sequence[int]) -> float:
    """What even the worker that waits least waits, without what was planned and what these workers may have caused."""
    ranks = list(run.workers) if run.flushes else round_trip
    least = min(worker.waiting for worker in run.workers.values())
    transient = 2 * run.way  # at most: the way of the first microbatch there and back, and that of the last one
    return least - run.planned_idle - transient - sum(run.excess(rank) for rank in ranks)
