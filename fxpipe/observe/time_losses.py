"""Where a run lost its time, in words that name the cause: the end of `fxpipe run`, `fxpipe compare`, the report.

A worker's run consists of forwards, backwards and updates, of other work (data, receiving), and of waits. Lost is what
forwards, backwards and updates take beyond the plan, and all of the rest.

Part of a wait was planned: other workers have more to do (uneven cuts), a flush, links. If that is nearly all of the
wait, it is the cause. Otherwise the other losses, which name their workers, cause the rest. If all that workers do
beyond the plan is less than half of the shortest wait of a worker, the messages cause it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpipe.observe.time_spent import APART, CLEARLY, DOES, LEAST, TimedRun, TimedWorker, Times, Wait

MOST = 3
"""How many losses are reported."""

AS_PLANNED = 0.9
"""The least planned share of a wait for the wait to be called planned."""

_NOUNS = {
    "activation": "activations",
    "gradient": "gradients",
    "saved": "saved values",
    "input": "inputs",
    "token": "pace signals",
    "up": "the gradients' norms or overflow check",
    "down": "the gradients' norm or overflow check",
    "loss": "the loss",
    "sum": "the sum over the replicas",
}


def time_losses(
    workers: Sequence[Mapping[str, Any]],
    forecast: Mapping[str, Any] | None,
    seconds: float,
    steps: int,
    microbatches: int,
    schedule: str | None = None,
) -> list[dict[str, Any]]:
    """The three largest losses of time of a run, largest first: `{"worker", "share", "cause", "text"}`.

    `share` is that of the worker's run, 0 to 1; `worker` is None for a loss of all workers. A loss with several
    effects, or on several workers, is one row, with the largest share. `cause` is one of `compute`, `data`, `predict`,
    `update`, `send`, `receive`, `other`, `fill`, `flush`, `uneven`, `link`, `plan`, and `wait`.

    Args:
        workers: rows of `run.json`.
        forecast: of `run.json`; without it nothing is compared with the plan.
        seconds, steps, microbatches: of the run.
        schedule: its name, which distinguishes a flush from other planned waits.
    """
    if steps <= 0 or not workers or not seconds > 0:
        return []
    planned = (forecast or {}).get("workers") or []
    plans = [Times.planned(row, steps, microbatches) for row in planned] if len(planned) == len(workers) else None
    rows = [TimedWorker.of(row, seconds) for row in workers]
    run = TimedRun(rows, plans, forecast or {}, seconds, steps, microbatches, schedule)
    found = [*_filling(run), *_beyond_plan(run), *_other_work(run), *_waits(run)]
    return _largest(found)


@dataclass(frozen=True)
class _Loss:
    """Losses with the same `key` are effects of one cause; `worker` None means all workers."""

    key: tuple[Any, ...]
    worker: int | None
    share: float
    cause: str
    text: str
    weight: float
    waits: bool = False


def _filling(run: TimedRun) -> list[_Loss]:
    empty = {rank: max(run.seconds - worker.seconds, 0.0) for rank, worker in run.workers.items()}
    lost = [(worker.fill + empty[rank]) / run.seconds for rank, worker in run.workers.items()]
    what = "fills and empties" if max(empty.values()) >= LEAST / 2 * run.seconds else "fills"
    text = f"the pipeline {what} for {max(lost):.0%} of the run: train longer"
    return [_Loss(("fill",), None, max(lost), "fill", text, sum(lost))]


def _beyond_plan(run: TimedRun) -> list[_Loss]:
    """The time that forwards, backwards and updates take beyond the plan."""
    found: list[_Loss] = []
    updates: list[_Loss] = []
    for worker, plan in run.both():
        took, reason = run.took[worker.rank], run.reason(worker.rank)
        parts = [("forwards", took.forward, plan.forward), ("backwards", took.backward, plan.backward)]
        slow = _slower((reason or "compute", worker.rank), worker, parts)
        why = f"it spends {worker.of_all(reason) / worker.seconds:.0%} {DOES[reason]}" if reason else worker.crowded
        if why:
            slow = [replace(loss, text=f"{loss.text}: {why}") for loss in slow]
        found += slow
        updates += _slower(("update", worker.rank), worker, [("updates", took.update, plan.update)])
    everywhere = _everywhere(run, found, updates)
    return [*found, *updates] if everywhere is None else everywhere


def _slower(key: tuple[Any, ...], worker: TimedWorker, parts: list[tuple[str, float, float]]) -> list[_Loss]:
    slow = [part for part in parts if part[2] > 0 and part[1] / part[2] >= CLEARLY]
    if not slow:
        return []
    measured, planned = sum(part[1] for part in slow), sum(part[2] for part in slow)
    share = (measured - planned) / worker.seconds
    what = " and ".join(part[0] for part in slow)
    text = f"worker {worker.rank}'s {what} take {_times(measured / planned)} what was planned"
    return [_Loss(key, worker.rank, share, str(key[0]), text, share)]


def _everywhere(run: TimedRun, slow: list[_Loss], updates: list[_Loss]) -> list[_Loss] | None:
    """One loss for all workers if all are equally slow, and the updates that it does not cover."""
    ratios = [_ratio(run.took[worker.rank].compute, plan.compute) for worker, plan in run.both()]
    causes = {loss.cause for loss in slow}
    if not 1 < len(ratios) == len(slow) or len(causes) > 1 or min(ratios) < CLEARLY or max(ratios) > 1.15 * min(ratios):
        return None
    both = [(run.took[worker.rank], plan) for worker, plan in run.both()]
    sums = {
        f"{part}s": (sum(getattr(took, part) for took, _ in both), sum(getattr(plan, part) for _, plan in both))
        for part in ("forward", "backward", "update")
    }
    named = [name for name in ("forwards", "backwards") if _ratio(*sums[name]) >= CLEARLY]
    if not named:
        return None
    cause = causes.pop()
    ratio = _ratio(*(sum(sums[name][i] for name in named) for i in (0, 1)))
    text = f"{' and '.join(named)} take {_times(ratio)} what was planned, on all workers"
    if cause != "compute":
        most = max(worker.of_all(cause) / worker.seconds for worker, _ in run.both())
        text += f", which spend up to {most:.0%} {DOES[cause]}"
    elif updates and len(updates) == sum(plan.update > 0 for _, plan in run.both()):
        text += f", and updates {_times(_ratio(*sums['updates']))}"
        slow, updates = [*slow, *updates], []
    if cause == "compute" and (why := [worker.crowded for worker, _ in run.both() if worker.crowded]):
        text += f": {why[0]}"
    total = sum(loss.share for loss in slow)
    return [_Loss((cause, None), None, total / len(ratios), cause, text, total), *updates]


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio >= 1.1 else f"{ratio:.2f} times"


def _ratio(measured: float, planned: float) -> float:
    return measured / planned if planned > 0 else 1.0


def _other_work(run: TimedRun) -> list[_Loss]:
    """Other work: for each kind, the worker that does it longest, and how long the others do it."""
    found = []
    for kind in run.outside:
        shares = {rank: run.spends(rank, kind) / worker.seconds for rank, worker in run.workers.items()}
        rank = max(shares, key=lambda r: (round(shares[r], 2), -r))
        more = kind == "receive" and any(plan.copy for _, plan in run.both())
        text = f"worker {rank} spends {shares[rank]:.0%}{' more' if more else ''} {DOES[kind]}"
        text += " than planned" if more else ""
        others = max((share for r, share in shares.items() if r != rank), default=0.0)
        if kind != "data" and others >= LEAST:
            text += f", {'the others up to' if len(shares) > 2 else 'the other'} {others:.0%}"
        found.append(_Loss((kind, rank), rank, shares[rank], kind, text, sum(shares.values())))
    return found


def _waits(run: TimedRun) -> list[_Loss]:
    found = []
    for rank, worker in run.workers.items():
        for wait in worker.waits:
            share = wait.seconds / worker.seconds
            if share < LEAST:
                continue
            of = "" if wait.source < 0 else f" of worker {wait.source}"
            awaited = " and ".join(_NOUNS.get(what, what) for what in wait.whats[:2])
            text = f"worker {rank} waits {share:.0%} for {awaited}{of}"
            key, why = _cause(run, worker, wait)
            found.append(_Loss(key, rank, share, key[0], text + why, share, waits=True))
    return found


def _cause(run: TimedRun, worker: TimedWorker, wait: Wait) -> tuple[tuple[Any, ...], str]:
    """The key of a wait, which begins with its cause, and the end of its sentence."""
    if run.plans is None or wait.source not in run.workers or wait.whats[0] in APART:
        return ("wait", worker.rank, wait.source, wait.whats), ""
    uneven = run.uneven(worker.rank)
    left = worker.waiting - uneven - run.planned_idle
    if left <= (1 - AS_PLANNED) * worker.waiting:
        if uneven > run.planned_idle:
            busiest, plan = max(run.plans.items(), key=lambda item: item[1].busy)
            own = run.plans[worker.rank]
            more = f"{plan.busy / own.busy - 1:.0%} more" if own.busy > 0 else "all"
            copies = plan.copy - own.copy > (plan.busy - own.busy) / 2
            why = "it copies more messages" if copies else "the cuts are uneven"
            return ("uneven", busiest), f": worker {busiest} has {more} to do ({why})"
        if run.flushes:
            return ("flush",), ": the pipeline empties after every minibatch"
        return ("plan",), ", as planned"
    share = wait.seconds / worker.seconds
    planned = run.planned_share(worker.rank) * wait.seconds / worker.waiting
    said = f", {planned:.0%} planned" if max(LEAST, share / 10) <= planned < share - LEAST / 2 else ""
    if wait.whats[0] != "weights" and run.unexplained >= left / 2:
        return ("link",), f"{said}: messages take longer than planned"
    return ("wait",), said


def _largest(losses: Sequence[_Loss]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[_Loss]] = {}
    for loss in losses:
        if math.isfinite(loss.share) and loss.share >= LEAST:
            groups.setdefault(loss.key, []).append(loss)
    ranked = sorted(groups.values(), key=lambda group: (-sum(loss.weight for loss in group), str(group[0].key)))
    rows = [_row(group) for group in ranked[:MOST]]
    return sorted(rows, key=lambda row: -row["share"])


def _row(group: Sequence[_Loss]) -> dict[str, Any]:
    largest = max(loss.share for loss in group)
    head = max(group, key=lambda loss: (loss.waits and loss.share >= 0.8 * largest, loss.share))  # a wait has both
    waiting = list({loss.worker: None for loss in group if loss.waits and loss.worker != head.worker})
    text = head.text
    if waiting:
        end = "wait{s}, too" if head.waits else "wait{s} for it"
        if len(waiting) == 1:
            text += f"; worker {waiting[0]} {end.format(s='s')}"
        else:
            text += f"; {len(waiting)} {'other ' if head.waits else ''}workers {end.format(s='')}"
    return {"worker": head.worker, "share": min(max(head.share, 0.0), 1.0), "cause": head.cause, "text": text}
