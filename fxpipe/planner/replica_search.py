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

import numpy as np

from fxpipe.planner.cost_model import CostModel
from fxpipe.planner.search import EPSILON
from fxpipe.planner.setting import Setting, StageDemands
from fxpipe.planner.sums_over_runs import Floats, Places
from fxpipe.planner.workers import Workers

_CHUNK = 1_000_000  # pairs priced at once
_SOME_COUNTS = (1, 2, 3, 4, 6)


@dataclass(frozen=True)
class ReplicatedPath:
    """A plan: its boundaries as rows (f, b, w, r), its replicas, and its slowest worker's cost in milliseconds."""

    cuts: Places
    replicas: tuple[int, ...]
    bottleneck: float


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

    def best(self, rows: Places, bound: float, budget: int) -> dict[int, ReplicatedPath]:
        """The best plan with inner boundaries among the rows, by its number of workers; if `chained`, one plan at 0.

        Args:
            bound: in milliseconds; only plans that are at most this slow count.
            budget: the most pairs of boundaries that may be priced.

        Raises:
            TooManyPairs: the budget is not enough.
        """
        load = self.costs.load(rows)
        through = _PlansThroughRows(self, rows[np.argsort(load, kind="stable")], bound * (1 + EPSILON), budget)
        found: dict[int, ReplicatedPath] = {}
        for stages in (*self.alone, self.shared):
            counts = range(len(self.alone) + 1, self.processes + 1) if stages is self.shared else (len(stages),)
            for total in self.totals if self.placed else self.totals[-1:]:
                for path in through.paths(stages, total):
                    if len(path.replicas) not in counts:
                        continue
                    key = 0 if self.chained else len(path.replicas)
                    if key not in found or path.bottleneck < found[key].bottleneck * (1 - EPSILON):
                        found[key] = path
        return found


def _alike(one: Sequence[StageDemands], other: Sequence[StageDemands], limited: bool) -> bool:
    def seen(stage: StageDemands) -> tuple[float, ...]:
        all_of_it = (stage.owned_factor, stage.held / stage.depth, stage.deferred / stage.depth)
        return (stage.owned_ms, *(all_of_it if limited else ()))

    return [seen(stage) for stage in one] == [seen(stage) for stage in other]


@dataclass
class _BestFromHere:
    """By boundary, the best bottleneck from there on, and the replicas of the first worker of that plan."""

    value: Floats
    replicas: Places


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
        self.priced: dict[tuple[float, ...], _PricedWorkers] = {}
        self.known: dict[tuple[StageDemands, int, int, int], _PricedWorkers] = {}

    def paths(self, stages: Sequence[StageDemands], total: int) -> Iterator[ReplicatedPath]:
        """The best plan of each number of workers; of exactly `total` processes, if their places matter."""
        search = self.search
        levels: list[list[_BestFromHere]] = []
        for level, stage in enumerate(stages):
            tables = [self._table() for _ in range(total + 1)]
            source = tables if search.chained else (levels[-1] if levels else [])
            firsts: list[tuple[float, int, int]] = []
            for used in range(1, total + 1):
                for own in search.counts:
                    after = used - own
                    if after < 0 or (not after and level):
                        continue
                    if after and (not source or not np.isfinite(source[after].value).any()):
                        continue
                    if used < total or not search.placed:
                        self._extend(tables[used], source, stage, (total - used, own, after))
                    if used == total or not search.placed:
                        value = self._first(source, stage, own, after)
                        if value is not None:
                            firsts.append((value, used, own))
            levels.append(tables)
            if firsts:
                least = min(value for value, _, _ in firsts)
                value, used, own = next(f for f in firsts if f[0] <= least * (1 + EPSILON))
                yield self._followed(levels, stages, level, total, used, own, value)

    def _table(self) -> _BestFromHere:
        return _BestFromHere(np.full(len(self.rows), np.inf), np.zeros(len(self.rows), dtype=np.int64))

    def _extend(
        self, table: _BestFromHere, source: Sequence[_BestFromHere], stage: StageDemands, around: tuple[int, int, int]
    ) -> None:
        """Put a worker before the known ones. `around`: processes before it, its replicas, and processes after it."""
        front, own, after = around
        edges = self._edges(stage, max(front, 1), own, after)
        if not len(edges.ends):
            return
        value = np.maximum(edges.costs, source[after].value[edges.ends]) if after else edges.costs
        least = np.minimum.reduceat(value, edges.starts)
        better = least < table.value[edges.begins]
        at = edges.begins[better]
        table.value[at], table.replicas[at] = least[better], own

    def _first(self, source: Sequence[_BestFromHere], stage: StageDemands, own: int, after: int) -> float | None:
        edges = self._edges(stage, 0, own, after)
        if not len(edges.ends):
            return None
        value = np.maximum(edges.costs, source[after].value[edges.ends]) if after else edges.costs
        least = float(value.min())
        return least if np.isfinite(least) else None

    def _followed(
        self,
        levels: Sequence[Sequence[_BestFromHere]],
        stages: Sequence[StageDemands],
        level: int,
        total: int,
        used: int,
        own: int,
        value: float,
    ) -> ReplicatedPath:
        """The path that reaches a value."""
        cuts, replicas, row, front = [self.start[0]], [own], 0, 0
        while (after := used - own) > 0:
            edges = self._edges(stages[level], max(front, 1) if len(replicas) > 1 else 0, own, after)
            level -= not self.search.chained
            table = levels[level][after]
            ends, costs = edges.of(row)
            row = int(ends[np.argmin(np.maximum(costs, table.value[ends]))])
            cuts.append(self.rows[row])
            used, own, front = after, int(table.replicas[row]), total - after
            replicas.append(own)
        return ReplicatedPath(np.array([*cuts, self.end[0]]), tuple(replicas), value)

    def _edges(self, stage: StageDemands, front: int, own: int, after: int) -> _PricedWorkers:
        """All workers within the bound with `own` replicas; those that begin at the start if `front` is 0."""
        if not self.search.placed:
            front, after = min(front, 1), min(after, 1)
        asked = (stage, front, own, after)
        if asked not in self.known:
            replicas = tuple(count for count in (front, own, after) if count)
            worker = int(front > 0)
            workers = self.search.setting.around(stage, replicas, worker)
            key = _key(workers, worker, front, after, self.search.limited)
            if key not in self.priced:
                self.priced[key] = self._price(workers, worker, front, after)
            self.known[asked] = self.priced[key]
        return self.known[asked]

    def _price(self, workers: Workers, worker: int, front: int, after: int) -> _PricedWorkers:
        search, own = self.search, workers.replicas[worker]
        begins, loads = (self.rows, self.load) if front else (self.start, np.zeros(1))
        ends, reached = (self.rows, self.load) if after else (self.end, np.full(1, self.total))
        slack = EPSILON * max(self.total, 1e-12)
        most = self.bound * workers.rates[worker] + slack
        least = max(self.total - self.bound * workers.speeds[worker] * (search.processes - own), 0.0) - slack
        first = np.searchsorted(reached, loads + least, side="left")
        last = np.maximum(np.searchsorted(reached, loads + most, side="right"), first)
        counts = last - first
        self.left -= int(counts.sum())
        if self.left < 0:
            raise TooManyPairs
        costs = search.costs.with_workers(workers)
        nothing = np.zeros(0, dtype=np.int64)
        found: list[tuple[Places, Places, Floats]] = [(nothing, nothing, np.zeros(0))]
        edges = np.concatenate([[0], np.cumsum(counts)])
        at = 0
        while at < len(begins):
            until = max(int(np.searchsorted(edges, edges[at] + _CHUNK, side="right")) - 1, at + 1)
            i = np.repeat(np.arange(at, until), counts[at:until])
            j = np.arange(len(i)) + np.repeat(first[at:until] - (edges[at:until] - edges[at]), counts[at:until])
            at = until
            ahead = ends[j, :3] - begins[i, :3]
            good = (ahead >= 0).all(axis=1) & (ahead > 0).any(axis=1)
            i, j = i[good], j[good]
            if not workers.links.free:
                good = costs.floor(worker, begins[i], ends[j]) <= self.bound
                i, j = i[good], j[good]
            cost = costs.price(worker, begins[i], ends[j]).cost
            good = (cost <= self.bound) & np.isfinite(cost)
            found.append((i[good], j[good], cost[good]))
        i, j, cost = (np.concatenate(parts) for parts in zip(*found, strict=True))
        where, starts = np.unique(i, return_index=True)
        return _PricedWorkers(where, starts, j, cost)


def _key(workers: Workers, worker: int, front: int, after: int, limited: bool) -> tuple[float, ...]:
    """What the price of a worker depends on."""
    key: tuple[float, ...] = (front > 0, after > 0, workers.replicas[worker], workers.owned_ms[worker])
    if workers.machines is not None:
        key += (front % workers.machines.size,)
    if limited:
        held = (workers.in_flight[worker], workers.deferred[worker], workers.in_flight_before[worker])
        key += (*held, workers.owned_factor[worker])
    return key
