"""Finds cuts and replicas together: which worker has how many of the processes, and runs what.

A plan is a path from the first boundary to the last, and each of its workers takes some of the processes. From the
back, `best[processes left][boundary]` is the smallest bottleneck of the workers from that boundary on: the problem of
PipeDream (SOSP 2019, section 3.1), for boundaries (f, b, w, r) instead of layers, and with the costs of `cost_model`.
The cost of a worker depends on its two boundaries, its replicas, and the processes before and after it (where they are,
and how many microbatches it holds for them); for memory and policies also on the number of workers after it.

For given boundaries, each pair of them within a bound is priced once for each number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxpipe.planner.candidate_workers import Candidates, Holdings, for_each
from fxpipe.planner.cost_model import CostModel, WorkerTimes
from fxpipe.planner.search import EPSILON, Path
from fxpipe.planner.setting import Setting, Slot, StageDemands
from fxpipe.planner.sums_over_runs import Floats, Places
from fxpipe.planner.workers import Workers

_CHUNK = 1_000_000  # pairs priced at once
_FEW_PROCESSES = 64
_DIGITS = 4
_SOME_COUNTS = (1, 2, 3, 4, 6)


class TooManyPairs(Exception):
    """There are more pairs of boundaries than may be priced."""


@dataclass(frozen=True)
class _PricedWorkers:
    """Workers within the bound, by their first boundary: row `begins[i]` has the ends and costs from `starts[i]` on."""

    begins: Places
    starts: Places
    ends: Places
    costs: Floats

    def of(self, begin: int) -> tuple[Places, Floats]:
        """Ends and costs of the workers that begin at a row."""
        at = int(np.searchsorted(self.begins, begin))
        last = self.starts[at + 1] if at + 1 < len(self.starts) else len(self.ends)
        return self.ends[self.starts[at] : last], self.costs[self.starts[at] : last]


class ReplicaSearch:
    """The best plans through given boundaries.

    Args:
        costs: of the profile, for any workers of the setting with replicas.
        processes: the most that there may be.
        by_count: whether to find the best plan for each number of workers, instead of the best of all.
        totals: the numbers of processes that a plan may have.
        counts: the numbers of replicas that a worker may have, rising.
    """

    def __init__(
        self,
        costs: CostModel,
        setting: Setting,
        processes: int,
        by_count: bool,
        totals: Sequence[int],
        counts: Sequence[int],
        most_workers: int,
    ) -> None:
        self.costs, self.setting, self.processes, self.totals = costs, setting, processes, tuple(totals)
        self.counts = [count for count in counts if count <= setting.microbatches]
        self.limited = bool(np.isfinite(setting.memory).any()) or setting.recompute == "full"
        self.placed = self.limited or setting.machines is not None  # where processes are makes a difference
        self.levels = costs.with_workers(setting.worker_in(Slot(0, 1, 0), setting.stages_of(1)[0])[0]).allowed(0)
        last = setting.stages_of(most_workers)
        first = 1  # the least number of workers from which on all end alike, as far as some of them tell
        for count in _SOME_COUNTS:
            if count < most_workers and not _alike(last[len(last) - count :], setting.stages_of(count), self.limited):
                first = count + 1
        if first > _SOME_COUNTS[-1]:
            first = most_workers
        one = all(_alike((stage,), last[-1:], self.limited) for stage in last)
        self.chained = one and first == 1 and not by_count  # whether one table serves any number of workers
        self.alone = [setting.stages_of(count)[::-1] for count in range(1, first)]
        self.shared = last[-1:] if self.chained else last[::-1]

    def used(self, total: int) -> list[int]:
        """The numbers of processes that the last workers of a plan for `total` may have together: any, if they are few.

        Else numbers with few binary digits, and what these leave for the workers in front.
        """
        few = total <= _FEW_PROCESSES
        return [n for n in range(1, total + 1) if few or _rounded(n) or _rounded(total - n)]

    def best(self, rows: Places, bound: float, budget: int) -> dict[int, Path]:
        """The best plan with inner boundaries among the rows, by its number of workers; if `chained`, one plan at 0.

        Args:
            bound: in milliseconds; only plans that are at most this slow count.
            budget: the most pairs of boundaries that may be priced.

        Raises:
            TooManyPairs: the budget is not enough.
        """
        load = self.costs.load(rows)
        through = _PlansThroughRows(self, rows[np.argsort(load, kind="stable")], bound * (1 + EPSILON), budget)
        best: dict[int, Path] = {}
        for stages in (*self.alone, self.shared):
            counts = range(len(self.alone) + 1, self.processes + 1) if stages is self.shared else (len(stages),)
            for total in self.totals if self.placed else self.totals[-1:]:
                for path in through.paths(stages, total):
                    if len(path.replicas) not in counts:
                        continue
                    key = 0 if self.chained else len(path.replicas)
                    if key not in best or path.bottleneck < best[key].bottleneck * (1 - EPSILON):
                        best[key] = path
        return best


def _rounded(number: int) -> bool:
    """Whether a number has few binary digits before its zeros."""
    return number % (1 << max(number.bit_length() - _DIGITS, 0)) == 0


def _alike(one: Sequence[StageDemands], other: Sequence[StageDemands], limited: bool) -> bool:
    def seen(stage: StageDemands) -> tuple[float, ...]:
        all_of_it = (stage.owned_factor, stage.held / stage.depth, stage.deferred / stage.depth)
        return (stage.owned_ms, *(all_of_it if limited else ()))

    return [seen(stage) for stage in one] == [seen(stage) for stage in other]


class _TimedWorkers(NamedTuple):
    """Workers that are within the bound if memory does not matter: rows of their begins and ends, what their times are
    made of, and what they hold at every level; nothing where there is no limit."""

    begins: Places
    ends: Places
    times: WorkerTimes
    held: tuple[Holdings, ...]


@dataclass(frozen=True)
class _BestFromHere:
    """By the number of processes from there on and by boundary: the best bottleneck from there on, and the replicas of
    the first worker of that plan. Numbers that reach no boundary are left out."""

    value: dict[int, Floats]
    replicas: dict[int, Places]


class _PlansThroughRows:
    """Plans through given rows; it keeps what it has priced."""

    def __init__(self, search: ReplicaSearch, rows: Places, bound: float, budget: int) -> None:
        self.search, self.rows, self.bound, self.left = search, rows, bound, budget
        self.costs = search.costs
        count = self.costs.count
        self.start = np.zeros((1, 4), dtype=np.int64)
        self.end = np.array([[count, count, count, 0]])
        self.load = self.costs.load(rows)
        self.total = float(self.costs.load(self.end)[0])
        every = np.concatenate([self.start, rows, self.end])
        self.costs.remember(every, every)
        machines = search.setting.machines
        self.size = machines.size if machines else 1
        self.rates = {stage.owned_ms: stage for stages in (*search.alone, search.shared) for stage in stages}
        self.timed: dict[tuple[object, ...], _TimedWorkers] = {}  # by all that their times depend on
        self.timed_in: dict[tuple[float, ...], _TimedWorkers] = {}  # the same by the kind of slot
        self.priced: dict[tuple[float, ...], _PricedWorkers] = {}

    def paths(self, stages: Sequence[StageDemands], total: int) -> Iterator[Path]:
        """The best plan of each number of workers; of exactly `total` processes, if their places matter."""
        search = self.search
        levels: list[_BestFromHere] = []
        allowed = search.used(total)
        for level, stage in enumerate(stages):
            table = _BestFromHere({}, {})
            source = table if search.chained else (levels[-1] if levels else None)
            firsts: list[tuple[float, int, int]] = []
            for used in allowed:
                for replicas in search.counts:
                    after = used - replicas
                    if after < 0 or (not after and level):
                        continue
                    if after and (source is None or after not in source.value):
                        continue
                    if used < total or not search.placed:
                        self._extend(table, source, Slot(total - used, replicas, after), stage)
                    if used == total or not search.placed:
                        edges = self._edges(Slot(0, replicas, after), stage)
                        if np.isfinite(least := self._values(source, edges, after).min(initial=np.inf)):
                            firsts.append((float(least), used, replicas))
            levels.append(table)
            if firsts:
                least = min(value for value, _, _ in firsts)
                value, used, replicas = next(f for f in firsts if f[0] <= least * (1 + EPSILON))
                yield self._followed(levels, stages, level, total, used, replicas, value)

    def _extend(self, table: _BestFromHere, source: _BestFromHere | None, slot: Slot, stage: StageDemands) -> None:
        """Put a worker, which is not the first, before the known ones."""
        edges = self._edges(slot._replace(before=max(slot.before, 1)), stage)
        if not len(edges.ends):
            return
        least = np.minimum.reduceat(self._values(source, edges, slot.after), edges.starts)
        if (used := slot.own + slot.after) not in table.value:
            if not np.isfinite(least).any():
                return
            table.value[used] = np.full(len(self.rows), np.inf)
            table.replicas[used] = np.zeros(len(self.rows), dtype=np.int64)
        better = least < table.value[used][edges.begins]
        at = edges.begins[better]
        table.value[used][at], table.replicas[used][at] = least[better], slot.own

    def _values(self, source: _BestFromHere | None, edges: _PricedWorkers, after: int) -> Floats:
        """The bottlenecks from the begins of workers on."""
        if not after:
            return edges.costs
        assert source is not None
        return np.maximum(edges.costs, source.value[after][edges.ends])

    def _followed(
        self,
        levels: Sequence[_BestFromHere],
        stages: Sequence[StageDemands],
        level: int,
        total: int,
        used: int,
        own: int,
        value: float,
    ) -> Path:
        """The path that reaches a value."""
        cuts, replicas, row, front = [self.start[0]], [own], 0, 0
        while (after := used - own) > 0:
            edges = self._edges(Slot(max(front, 1) if len(replicas) > 1 else 0, own, after), stages[level])
            level -= not self.search.chained
            table = levels[level]
            ends, costs = edges.of(row)
            row = int(ends[np.argmin(np.maximum(costs, table.value[after][ends]))])
            cuts.append(self.rows[row])
            used, own, front = after, int(table.replicas[after][row]), total - after
            replicas.append(own)
        return Path(np.array([*cuts, self.end[0]]), value, tuple(replicas))

    def _edges(self, slot: Slot, stage: StageDemands) -> _PricedWorkers:
        """All workers within the bound in a slot; those that begin at the start if there are none before it."""
        setting, limited = self.search.setting, self.search.limited
        kind = (slot.before > 0, slot.own, slot.after > 0, slot.before % self.size, stage.owned_ms)
        held = (stage.owned_factor, *setting.held_in(slot, stage)) if limited else ()
        if kind not in self.timed_in:
            self._time(kind[0], slot.own, kind[2])
        timed = self.timed_in[kind]
        if (key := (id(timed), *held)) not in self.priced:
            self.priced[key] = self._fitting(timed, *setting.worker_in(slot, stage))
        return self.priced[key]

    def _fitting(self, timed: _TimedWorkers, workers: Workers, worker: int) -> _PricedWorkers:
        """The workers that are within the bound, and within memory."""
        i, j, cost = timed.begins, timed.ends, timed.times.cost
        if self.search.limited:
            cost = self.costs.with_workers(workers).fitting(worker, timed.times, timed.held).cost
            good = (cost <= self.bound) & np.isfinite(cost)
            i, j, cost = i[good], j[good], cost[good]
        where, starts = np.unique(i, return_index=True)
        return _PricedWorkers(where, starts, j, cost)

    def _time(self, follows: bool, own: int, leads: bool) -> None:
        """Time all workers with `own` replicas that are within the bound, wherever their processes are.

        Args:
            follows, leads: whether there are workers in front of it, and after it.
        """
        search, new = self.search, dict[tuple[object, ...], tuple[CostModel, int]]()
        kinds: dict[tuple[float, ...], tuple[object, ...]] = {}
        for rate, stage in self.rates.items():
            for front in range(1, max(min(self.size, search.processes - own - leads), 1) + 1) if follows else (0,):
                workers, worker = search.setting.worker_in(Slot(front, own, int(leads)), stage)
                costs = search.costs.with_workers(workers)
                terms = (follows, leads, *costs.terms(worker))
                kinds[follows, own, leads, front % self.size, rate] = terms
                if terms not in self.timed:
                    new[terms] = costs, worker
        parts: dict[tuple[object, ...], list[_TimedWorkers]] = {terms: [] for terms in new}
        for i, j, pairs in self._pairs(follows, leads, [*new.values()]):
            held = pairs.holdings(search.levels) if search.limited else ()
            for terms, (costs, worker) in new.items():
                times = costs.times(worker, pairs)
                good = np.flatnonzero((times.cost <= self.bound) & np.isfinite(times.cost))
                timed = _TimedWorkers(i, j, times, held)
                parts[terms].append(for_each(lambda known, good=good: known[good], timed))
        self.timed |= {terms: for_each(lambda *arrays: np.concatenate(arrays), *some) for terms, some in parts.items()}
        self.timed_in |= {kind: self.timed[terms] for kind, terms in kinds.items()}

    def _pairs(
        self, follows: bool, leads: bool, priced: Sequence[tuple[CostModel, int]]
    ) -> Iterator[tuple[Places, Places, Candidates]]:
        """Pairs of rows that workers with the same number of replicas may begin and end at, some at a time.

        Raises:
            TooManyPairs: with all that they are priced for, they exceed the budget.
        """
        begins, loads = (self.rows, self.load) if follows else (self.start, np.zeros(1))
        ends, reached = (self.rows, self.load) if leads else (self.end, np.full(1, self.total))
        workers, worker = (priced[0][0].workers, priced[0][1]) if priced else (self.costs.workers, 0)
        others = self.search.processes - workers.replicas_of(worker)
        slack = EPSILON * max(self.total, 1e-12)
        most = self.bound * workers.rates[worker] + slack
        least = max(self.total - self.bound * workers.speeds[worker] * others, 0.0) - slack
        first = np.searchsorted(reached, loads + least, side="left")
        last = np.maximum(np.searchsorted(reached, loads + most, side="right"), first)
        counts = last - first
        self.left -= int(counts.sum()) * len(priced)
        if self.left < 0:
            raise TooManyPairs
        edges = np.concatenate([[0], np.cumsum(counts)])
        until = 0
        while priced and (not until or until < len(begins)):
            at, until = until, max(int(np.searchsorted(edges, edges[until] + _CHUNK, side="right")) - 1, until + 1)
            i = np.repeat(np.arange(len(begins))[at:until], counts[at:until])
            j = np.arange(len(i)) + np.repeat(first[at:until] - (edges[at:until] - edges[at]), counts[at:until])
            ahead = ends[j, :3] - begins[i, :3]
            good = (ahead >= 0).all(axis=1) & (ahead > 0).any(axis=1)
            i, j = i[good], j[good]
            pairs = self.costs.between(begins[i], ends[j])
            if not self.costs.workers.links.free:
                floors = [costs.floor(worker, pairs) <= self.bound for costs, worker in priced]
                hopeful = np.flatnonzero(np.logical_or.reduce(floors))
                i, j, pairs = i[hopeful], j[hopeful], pairs.take(hopeful)
            yield i, j, pairs
