"""How every worker of a run spent its time, compared with the plan.

A worker's run consists of forwards, backwards and updates with all that is inside them (predictions, sends), for which
a plan has times; of other work (data, receiving); and of waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.schedule import SCHEDULES

LEAST = 0.01
"""The least share of its worker's time for anything to be named."""

CLEARLY = 1.05
"""The least ratio of measured to planned for something to be called slower."""

WHOLES = ("F", "B", "update")
"""What a plan has times for, by the names in `took` of a row of `run.json`: B includes separate weight gradients."""

APART = ("up", "down", "loss", "sum")
"""What workers wait for that no plan has times for."""

_SPENT = {"F": ("F",), "B": ("B", "W"), "update": ("update",)}

_COMPUTES = ("F", "B", "W", "predict", "update")
HAS_A_CORE = 0.8
"""The least share of its work in which a worker's thread runs on a core, if no other program takes the core."""

DOES = {
    "data": "in train_data()",
    "predict": "predicting weights",
    "update": "in updates",
    "send": "sending",
    "receive": "receiving",
    "save": "copying what checkpoints need",
    "other": "between its actions",
}
"""What a worker does when it neither computes nor waits, in words."""


@dataclass(frozen=True)
class Times:
    """What a worker's run takes, or was planned to take: total seconds.

    Attributes:
        forward, backward, update: with all that is inside them except waits and receives: predictions, sends, packing.
            An update is not part of its backward.
        copy: for copying messages, at either end.
    """

    forward: float
    backward: float
    update: float
    copy: float = 0.0

    @staticmethod
    def planned(row: Mapping[str, Any], steps: int, microbatches: int) -> Times:
        """From a row of a forecast's workers."""
        forward, backward, update, copy = (
            float(row.get(f"{what}_ms") or 0.0) / 1e3 for what in ("forward", "backward", "update", "copy")
        )
        actions = steps * microbatches
        return Times(forward * actions, backward * actions, update * steps, copy * steps)

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def busy(self) -> float:
        return self.compute + self.update + self.copy


@dataclass(frozen=True)
class Wait:
    """How long a worker waits for another, and for which values; the filling of the pipeline does not count."""

    source: int
    whats: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class TimedWorker:
    """What a worker's run took, in seconds: a row of `run.json`.

    Attributes:
        crowded: what takes its cores, and what to do, in words; empty where nothing does.
    """

    rank: int
    seconds: float
    spent: Mapping[str, float]
    fill: float
    waits: tuple[Wait, ...]
    took: Times
    crowded: str = ""

    @staticmethod
    def of(row: Mapping[str, Any], seconds: float) -> TimedWorker:
        spent = {kind: float(value) for kind, value in (row.get("spent") or {}).items()}
        fill = min(float(row.get("fill") or 0.0), spent.get("wait", 0.0))
        waits = _grouped(row.get("waits") or (), fill)
        took = Times(*(float((row.get("took") or {}).get(kind) or 0.0) for kind in WHOLES))
        crowded = _crowded(row.get("host") or {}, sum(spent.get(kind, 0.0) for kind in _COMPUTES))
        return TimedWorker(row["worker"], float(row.get("seconds") or seconds), spent, fill, waits, took, crowded)

    def of_all(self, *kinds: str) -> float:
        return sum(self.spent.get(kind, 0.0) for kind in kinds)

    @property
    def waiting(self) -> float:
        """Without the filling of the pipeline."""
        return max(self.of_all("wait") - self.fill, 0.0)

    @property
    def occupied(self) -> float:
        """All time except waiting."""
        return self.seconds - self.of_all("wait")


class TimedRun:
    """The workers of a run, and what the plan says about them.

    Attributes:
        took: by worker. What the plan counts as copying messages, and the run did in sends, is subtracted from what a
            worker does beyond its plan. Without a plan it has no predictions, sends and receives in it.
        outside: the kinds of time that workers spend outside forwards, backwards and updates.
        way: of one microbatch through all workers, there and back.
        planned_seconds: of the whole run, if all of it were as steady as the plan.
        planned_idle: seconds that the worker with the most work was planned to wait.
        pace: how many times as long as planned the quickest worker takes for its forwards and backwards; at least 1.
    """

    def __init__(
        self,
        workers: Sequence[TimedWorker],
        plans: Sequence[Times] | None,
        forecast: Mapping[str, Any],
        seconds: float,
        steps: int,
        microbatches: int,
        schedule: str | None,
    ) -> None:
        self.workers = {worker.rank: worker for worker in workers}
        self.plans = None if plans is None else dict(zip(self.workers, plans, strict=True))
        self.seconds = seconds
        self.flushes = schedule is not None and (schedule not in SCHEDULES or SCHEDULES[schedule].synchronous)
        self.took = {worker.rank: self._took(worker) for worker in workers}
        apart = () if self.plans else ("predict", "send", "update")
        self.outside: tuple[str, ...] = ("data", "receive", "save", "other", *apart)
        self.way = sum(took.compute for took in self.took.values()) / (steps * microbatches)
        self.planned_idle = self.planned_seconds = 0.0
        self.pace = 1.0
        if self.plans is None:
            return
        busy = [plan.busy for plan in self.plans.values()]
        bubble = min(max(float(forecast.get("bubble") or 0.0), 0.0), 0.99)
        steady = float(forecast.get("milliseconds") or 0.0) * steps / 1e3
        self.planned_seconds = max(steady or sum(busy) / len(busy) / (1 - bubble), *busy, 1e-12)
        ratios = [self.took[rank].compute / plan.compute for rank, plan in self.plans.items() if plan.compute > 0]
        self.pace = max(1.0, min(ratios, default=1.0))
        self.planned_idle = self.planned_seconds - max(busy)
        if self.flushes:  # this is time in which other workers compute
            self.planned_idle *= self.pace

    def both(self) -> list[tuple[TimedWorker, Times]]:
        """Every worker with its plan; empty without a plan."""
        return [] if self.plans is None else [(w, self.plans[rank]) for rank, w in self.workers.items()]

    def planned_share(self, rank: int) -> float:
        """The share of its time that a worker waits, according to the plan."""
        assert self.plans is not None
        return 1 - self.plans[rank].busy / self.planned_seconds

    def uneven(self, rank: int) -> float:
        """Seconds that a worker was planned to wait because it has less to do than another one."""
        assert self.plans is not None
        return (max(plan.busy for plan in self.plans.values()) - self.plans[rank].busy) * self.pace

    def spends(self, rank: int, kind: str) -> float:
        """Seconds of a kind in `outside`, beyond its plan: the plan covers only the copying of messages."""
        copy = self.plans[rank].copy if self.plans is not None and kind == "receive" else 0.0
        return max(self.workers[rank].of_all(kind) - copy, 0.0)

    @property
    def unexplained(self) -> float:
        """What even the worker that waits least waits, without what was planned and what workers may have caused."""
        least = min(worker.waiting for worker in self.workers.values())
        transient = 2 * self.way  # at most: the way of the first microbatch there and back, and that of the last one
        excess = sum(max(worker.occupied - plan.busy, 0.0) for worker, plan in self.both())
        return least - self.planned_idle - transient - excess

    def reason(self, rank: int) -> str | None:
        """What makes a worker's forwards and backwards longer than planned: "predict", "send", or None for the
        computation.

        A plan does not say how much of a forward is prediction. So prediction is to blame only if the rest of forwards
        and backwards takes no longer than the whole was planned to take: a slow machine would show there.
        """
        if self.plans is None:
            return None
        worker, plan, took = self.workers[rank], self.plans[rank], self.took[rank]
        if worker.of_all("F") > CLEARLY * plan.forward or worker.of_all("B", "W") > CLEARLY * plan.backward:
            return None
        forward = max(took.forward - plan.forward, 0.0)  # backwards predict nothing
        excess = forward + max(took.backward - plan.backward, 0.0)
        parts = {"predict": min(worker.of_all("predict"), forward), "send": min(worker.of_all("send"), excess)}
        most = max(parts, key=lambda kind: parts[kind])
        return most if sum(parts.values()) >= 0.9 * excess and parts[most] >= excess / 2 > 0 else None

    def _took(self, worker: TimedWorker) -> Times:
        if self.plans is None:
            return Times(*(worker.of_all(*_SPENT[kind]) for kind in WHOLES))
        took, plan = worker.took, self.plans[worker.rank]
        pairs = ((took.forward, plan.forward), (took.backward, plan.backward), (took.update, plan.update))
        beyond = [max(measured - planned, 0.0) for measured, planned in pairs]
        copied = min(worker.of_all("send"), max(plan.copy - worker.of_all("receive"), 0.0), sum(beyond))
        kept = 1 - copied / sum(beyond) if copied else 1.0
        return Times(*(m - (1 - kept) * more for (m, _), more in zip(pairs, beyond, strict=True)))


def _grouped(rows: Iterable[Mapping[str, Any]], fill: float) -> tuple[Wait, ...]:
    """Waits by the worker waited for, largest first. The filling is subtracted, first from values, equally from all."""
    sums: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows:
        what, source = row["what"], row["from"]
        family = what if what in ("weights", *APART) else "values"
        group = sums.setdefault((-1 if source is None else source, family), {})
        group[what] = group.get(what, 0.0) + float(row["seconds"])
    values = sum(sum(group.values()) for (_, family), group in sums.items() if family == "values")
    rest = sum(sum(group.values()) for group in sums.values()) - values
    left = {True: _left(values, fill), False: _left(rest, fill - values)}
    waits = []
    for (source, family), group in sums.items():
        total = sum(group.values())
        named = sorted(group, key=lambda what: (-group[what], what))
        whats = tuple(what for what in named if group[what] >= total / 4)
        waits.append(Wait(source, whats, total * left[family == "values"]))
    return tuple(sorted(waits, key=lambda wait: (-wait.seconds, wait.source, wait.whats)))


def _left(total: float, fill: float) -> float:
    return 1 - min(max(fill, 0.0) / total, 1.0) if total > 0 else 1.0


def _crowded(host: Mapping[str, Any], computes: float) -> str:
    """What takes a worker's cores, by the `host` of its row, and what to do; empty where nothing does.

    Args:
        computes: seconds in which it computes.
    """
    if host.get("cpu_seconds") is None:  # as on CUDA, where the cores do not compute
        return ""
    processes, threads, cores = (int(host[name]) for name in ("processes", "threads", "cores"))
    if processes * threads > cores:
        own = "process" if processes == 1 else "processes"
        each = "thread" if threads == 1 else "threads"
        less = f"--threads {cores // processes}, " if processes <= cores else ""
        fewer = "" if processes == 1 else "fewer processes on this host, or --local"
        advice = (less + fewer).removesuffix(", ")
        return f"{processes} {own} × {threads} {each} share {cores} core{'s' if cores > 1 else ''} ({advice})"
    if host["cpu_seconds"] < HAS_A_CORE * computes:
        share = host["cpu_seconds"] / computes
        return (
            f"a worker had a core for at most {share:.0%} of that time: other programs use the cores (end them, or "
            "use another host)"
        )
    return ""
