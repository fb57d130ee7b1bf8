"""How every worker of a run spent its time, beside what was planned for it.

A worker's run is what it computes, what it does besides (data, prediction, messages), and what it waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.schedule import SCHEDULES

LEAST = 0.01
"""The share of its worker's time from which on anything is named."""

CLEARLY = 1.05
"""Measured over planned, from which on something is called slower."""

DOES = {
    "data": "in train_data()",
    "predict": "predicting weights",
    "update": "in updates",
    "send": "sending",
    "receive": "receiving",
    "other": "between its actions",
}
"""What a worker does when it neither computes nor waits, in words."""

BESIDES = ("predict", "send", "receive", "other")
"""What every worker does besides computing and waiting, and no plan speaks of."""


@dataclass(frozen=True)
class Planned:
    """What a worker's run was planned to take: seconds in all."""

    forward: float
    backward: float
    update: float

    @staticmethod
    def of(row: Mapping[str, Any], steps: int, microbatches: int) -> Planned:
        actions = steps * microbatches / 1e3
        return Planned(row["forward_ms"] * actions, row["backward_ms"] * actions, row["update_ms"] * steps / 1e3)

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def work(self) -> float:
        return self.compute + self.update


@dataclass(frozen=True)
class Wait:
    """What a worker waits for another: by kinds of values; the filling of the pipeline is no part of it."""

    source: int
    whats: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Worker:
    """What a worker's run took, in seconds: a row of `run.json`."""

    rank: int
    seconds: float
    spent: Mapping[str, float]
    fill: float
    waits: tuple[Wait, ...]

    @staticmethod
    def of(row: Mapping[str, Any], seconds: float) -> Worker:
        spent = {kind: float(value) for kind, value in (row.get("spent") or {}).items()}
        fill = min(float(row.get("fill") or 0.0), spent.get("wait", 0.0))
        waits = _grouped(row.get("waits") or (), fill, row["rank"])
        return Worker(row["rank"], float(row.get("seconds") or seconds), spent, fill, waits)

    def of_all(self, *kinds: str) -> float:
        return sum(self.spent.get(kind, 0.0) for kind in kinds)

    @property
    def compute(self) -> float:
        return self.of_all("F", "B")

    @property
    def waiting(self) -> float:
        """Without the filling of the pipeline."""
        return max(self.of_all("wait") - self.fill, 0.0)

    @property
    def occupied(self) -> float:
        """All but waiting."""
        return self.seconds - self.of_all("wait")


class Run:
    """The workers, and what the plan says of all of them."""

    def __init__(
        self,
        workers: Sequence[Worker],
        plans: Sequence[Planned] | None,
        forecast: Mapping[str, Any],
        seconds: float,
        actions: int,
        schedule: str | None,
    ) -> None:
        self.workers = {worker.rank: worker for worker in workers}
        self.plans = None if plans is None else dict(zip(self.workers, plans, strict=True))
        self.seconds = seconds
        self.flushes = schedule in SCHEDULES and SCHEDULES[schedule].synchronous
        self.way = sum(worker.compute for worker in workers) / actions  # of one microbatch, there and back
        self.planned_idle = self.planned_seconds = 0.0
        if self.plans is None:
            return
        bubble = float(forecast.get("bubble") or 0.0)
        works = [plan.work for plan in self.plans.values()]
        self.planned_seconds = sum(works) / len(works) / (1 - min(max(bubble, 0.0), 0.99))
        slowest = max([1.0, *(w.compute / p.compute for w, p in self.both() if p.compute > 0)])
        self.planned_idle = max(self.planned_seconds - max(works), 0.0) * slowest  # of the worker with most to do

    def both(self) -> list[tuple[Worker, Planned]]:
        """Every worker with its plan; nothing without a plan."""
        return [] if self.plans is None else [(w, self.plans[rank]) for rank, w in self.workers.items()]

    def excess(self, rank: int) -> float:
        """What a worker does beyond its plan, whatever it is."""
        assert self.plans is not None
        return max(self.workers[rank].occupied - self.plans[rank].work, 0.0)


def _grouped(rows: Iterable[Mapping[str, Any]], fill: float, rank: int) -> tuple[Wait, ...]:
    """Waits by whom for, the largest first. Of what comes from earlier workers the filling is taken away."""
    sums: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows:
        what, source = row["what"], row["from"]
        family = what if what in ("weights", "norm", "loss") else "values"
        group = sums.setdefault((-1 if source is None else source, family), {})
        group[what] = group.get(what, 0.0) + float(row["seconds"])
    found = []
    for (source, family), group in sums.items():
        total = sum(group.values())
        named = sorted(group, key=lambda what: (-group[what], what))
        whats = tuple(what for what in named if group[what] >= total / 4)
        found.append((family == "values" and source < rank, Wait(source, whats, total)))
    found.sort(key=lambda pair: (not pair[0], -pair[1].seconds, pair[1].source, pair[1].whats))
    waits = []
    for _, wait in found:
        taken = min(fill, wait.seconds)
        fill -= taken
        waits.append(Wait(wait.source, wait.whats, wait.seconds - taken))
    return tuple(sorted(waits, key=lambda wait: (-wait.seconds, wait.source, wait.whats)))
