"""Partitions whose workers have replicas, chosen together with the cuts for a number of processes.

Shared cuts and their replicas are searched over all positions at once (`replica_search`), which is exact. So are
separate cuts, if there are few enough. If not, the search begins with the best shared plan. In turn, it improves the
cuts for the plan's replicas (`partition`), and replicas together with cuts in windows around the plan, until neither
finds a better one. Each step is bounded, and the partition says how far from the optimum it can be at most.

With more than 16 processes, workers may have only some numbers of replicas (`counts_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import numpy as np

from fxpipe.planner.candidates import MODES, Positions, in_turn, positions, window, with_choices, within
from fxpipe.planner.cost_model import CostModel
from fxpipe.planner.partition import Partition, TooLittleMemory, boundaries, of_rows, partitions
from fxpipe.planner.profile import Profile
from fxpipe.planner.replica_search import ReplicaSearch, TooManyPairs
from fxpipe.planner.search import EPSILON, Path
from fxpipe.planner.setting import Setting
from fxpipe.planner.sums_over_runs import Places
from fxpipe.planner.workers import Workers

BUDGET = 30_000_000  # pairs of boundaries that may be priced in one search
_MOST_ROWS = 6_000
_FEW = 40  # shared positions of the first search, which only bounds the next
_FEW_PROCESSES = 16  # up to so many, workers have any number of replicas, and plans leave any number of processes out
_WORKERS = 16  # of more processes, plans of more workers are looked at only if none of fewer fits
_ROUNDS = 6
_OFFSETS = (tuple(range(-4, 5)), (-34, -21, -13, -8, -5, -3, -2, -1, 0, 1, 2, 3, 5, 8, 13, 21, 34), (-2, -1, 0, 1, 2))
_SHORT_OFFSETS = ((-2, -1, 0, 1, 2), (-13, -5, -2, 0, 2, 5, 13), (-1, 0, 1))


def replicated_partitions(
    profile: Profile,
    setting: Setting,
    processes: int,
    modes: Sequence[str] = MODES,
    say: Callable[[str], None] = lambda text: None,
    budget: int = BUDGET,
) -> dict[str, Partition]:
    """The fastest partition of each mode on at most `processes` processes, with its replicas.

    With a flush, the time of a minibatch counts, with filling and draining; else the bottleneck.

    Args:
        setting: of equal processes; its links are between any two of them, or between machines.
        budget: pairs of boundaries that may be priced in one search.

    Raises:
        TooLittleMemory: no plan was found that fits.
        CutError: processes differ, or the schedule has several workers in each.
    """
    if not processes >= 1:
        raise ValueError(f"there must be at least one process, not {processes}")
    setting.workers(1, (1,))  # raises for what has no replicas
    wanted = [mode for mode in MODES if mode in modes]
    most = min(processes, 3 * len(profile.units))  # a worker has F, B or W of some unit
    counts = [most] if processes <= _FEW_PROCESSES else [min(_WORKERS << i, most) for i in range(most.bit_length())]
    for workers in dict.fromkeys(counts):
        search = _SearchByModes(profile, setting, processes, workers, say, budget)
        by_mode: dict[str, Partition] = {}
        best: Partition | None = None
        for mode in MODES[: MODES.index(wanted[-1]) + 1]:
            partition = search.best(mode, best)
            if partition is not None:
                best = partition
                if mode in wanted:
                    by_mode[mode] = partition
        if wanted[-1] in by_mode:
            return by_mode
    raise TooLittleMemory(
        f"no {wanted[-1]} plan for {processes} processes was found that fits into memory",
        hint="give them more memory, or use more processes",
    )


def totals_of(processes: int, setting: Setting) -> tuple[int, ...]:
    """The numbers of processes that a plan may have: any, if they are few or alike; else all, or half the machines."""
    if processes <= _FEW_PROCESSES or not _placed(setting):
        return tuple(range(1, processes + 1))
    size = setting.machines.size if setting.machines else 1
    return tuple(sorted({max(processes // (2 * size), 1) * size, processes}))


def counts_of(processes: int, setting: Setting) -> tuple[int, ...]:
    """The numbers of replicas that a worker may have: any, if processes are few.

    Else divisors of their number, and powers of two: others divide machines and microbatches badly. If it makes no
    difference which processes a worker has, also what these leave: 60 of 64, like PipeDream's 15 of 16.
    """
    if processes <= _FEW_PROCESSES:
        return tuple(range(1, processes + 1))
    even = {n for n in range(1, processes + 1) if processes % n == 0 or n.bit_count() == 1}
    left = set() if _placed(setting) else {processes - n for n in even if n < processes}
    return tuple(sorted(even | left))


def _placed(setting: Setting) -> bool:
    """Whether it makes a difference which processes a worker has."""
    return setting.machines is not None or bool(np.isfinite(setting.memory).any())


def minibatch_seconds(partition: Partition, workers: Workers, flush: bool) -> float:
    """Seconds of a minibatch: the slowest worker's, and with a flush also those of filling and draining the pipeline.

    These are one microbatch on every other worker, without a share of the update.
    """
    steady = workers.microbatches * partition.bottleneck
    if not flush:
        return steady
    alone = [
        (load.total - load.update) * workers.microbatches / workers.own_microbatches(k)
        for k, load in enumerate(partition.loads)
    ]
    slowest = max(range(workers.count), key=lambda k: partition.loads[k].total)
    return steady + sum(alone) - alone[slowest]


def notation(replicas: Sequence[int]) -> str:
    """PipeDream's notation: `15-1`; `16` for data parallelism; `straight` if every worker has one process.

    A run of more than three equal numbers is written once: `4×2-8`.
    """
    if len(replicas) > 1 and set(replicas) == {1}:
        return f"straight ({len(replicas)})"
    parts = []
    for count, run in groupby(replicas):
        length = len(list(run))
        parts += [f"{length}×{count}"] if length > 3 else [str(count)] * length
    return "-".join(parts)


class _SearchByModes:
    """Finds the best plan of one mode after another."""

    def __init__(
        self, profile: Profile, setting: Setting, processes: int, most: int, say: Callable[[str], None], budget: int
    ) -> None:
        self.profile, self.setting, self.processes = profile, setting, processes
        self.say, self.budget, self.most = say, budget, most
        self.few = processes <= _FEW_PROCESSES
        say("what each worker holds")
        self.costs = CostModel(profile, setting.workers(1, (1,)))
        self.flush = setting.schedule_of(1).synchronous
        totals, counts = totals_of(processes, setting), counts_of(processes, setting)
        self.search = ReplicaSearch(self.costs, setting, processes, self.flush, totals, counts, most)
        self.known: list[Partition] = []  # each better than the one before
        self.improved: set[tuple[str, tuple[int, ...]]] = set()
        self.ideal = profile.total_ms(setting.microbatches) / self.costs.workers.speeds[0] / processes

    def best(self, mode: str, narrower: Partition | None) -> Partition | None:
        """The best plan of a mode, or the narrower one if that is as good; None if nothing fits."""
        where = positions(self.costs, mode)
        if not self.known:
            self.say(f"{mode}: a first plan")
            self._start(mode, where)
        bound, least = self._bound(), self.ideal
        rows = self._all(mode, where, bound)
        searched = False
        if rows is not None:
            self.say(f"{mode}: cuts and replicas")
            with suppress(TooManyPairs):
                exact = self._through(rows, bound, self.budget)
                self._keep(exact)
                searched = True
                if self.few:  # else other numbers of replicas could be better
                    least = min([bound, *(1e3 * partition.bottleneck for partition in exact)])
        if not searched:
            self._improve(mode, where)
        elif (
            self.flush and self.known
        ):  # of cuts with the same bottleneck, those with less traffic fill and drain faster
            self._improve_cuts(mode, self.known[-1].replicas)
        if not self.known:
            return None
        chosen = self.known[-1]
        if narrower is not None and self._seconds(narrower) <= self._seconds(chosen) * (1 + EPSILON):
            chosen = narrower
        least = min(least / 1e3, chosen.bottleneck)
        return replace(chosen, mode=mode, ideal=self.ideal / 1e3, lower_bound=least)

    def _start(self, mode: str, where: Positions) -> None:
        """A first plan: the best of a few shared cuts; if none of them fits, of a pipeline without replicas."""
        for few in (_FEW, _FEW // 4):
            try:
                self._keep(self._through(_thinned(self.costs, where, few), np.inf, self.budget))
                break
            except TooManyPairs:
                continue
        pipeline = min(self.processes, len(self.profile.units))
        if not self.known and pipeline <= self.most:
            self._improve_cuts(mode, (1,) * pipeline)

    def _bound(self) -> float:
        """In milliseconds, a bottleneck that the best plan does not exceed."""
        if not self.known:
            return np.inf
        return 1e3 * self._seconds(self.known[-1]) / self.setting.microbatches

    def _seconds(self, partition: Partition) -> float:
        """Seconds of a minibatch, which the search minimises."""
        workers = self.setting.workers(len(partition.replicas), partition.replicas)
        return minibatch_seconds(partition, workers, self.flush)

    def _keep(self, found: Sequence[Partition]) -> None:
        """Keep the best of them, if it is better than the known ones."""
        best = min(found, key=self._seconds, default=None)
        if best is not None and not (
            self.known and self._seconds(best) >= self._seconds(self.known[-1]) * (1 - EPSILON)
        ):
            self.known.append(best)

    def _through(self, rows: Places, bound: float, budget: int) -> list[Partition]:
        """The best plans through rows, for each number of workers; none if none is within the bound.

        Raises:
            TooManyPairs: the budget is not enough.
        """
        paths = [*self.search.best(rows, bound, budget).values()]
        if not self.flush:  # the bottleneck is all that counts; what policies ask of workers takes long to find out
            paths = sorted(paths, key=lambda path: path.bottleneck)[:1]
        return [self._found(path) for path in paths]

    def _found(self, path: Path) -> Partition:
        workers = self.setting.workers(len(path.replicas), path.replicas)
        return of_rows(self.costs.with_workers(workers), path.cuts, "three-way")

    def _all(self, mode: str, where: Positions, bound: float) -> Places | None:
        """All boundaries that plans within the bound can have; None if there are too many."""
        total = float(self.costs.load(np.full((1, 4), self.costs.count))[0])
        found = within(self.costs, where, mode, 0.0, total, 40 * _MOST_ROWS)
        if found is None:
            return None
        speed = self.costs.workers.speeds[0]
        load, good = self.costs.load(found), np.zeros(len(found), dtype=bool)
        for left in range(1, self.processes):
            most, least = bound * speed * (self.processes - left), total - bound * speed * left
            slack = EPSILON * max(total, 1e-12)
            good |= (load >= least - slack) & (load <= most + slack)
        rows = _inner(self.costs, with_choices(self.costs, found[good]))
        return rows if len(rows) <= _MOST_ROWS else None

    def _improve(self, mode: str, where: Positions) -> None:
        """In turn, improve cuts for the best plan's replicas, and replicas together with cuts around it."""
        patterns: tuple[tuple[int, ...], ...] = _OFFSETS if self.few and mode != "three-way" else _SHORT_OFFSETS
        if mode == "same":
            patterns = (tuple(range(-60, 61)), tuple(8 * o for o in _OFFSETS[1]), tuple(range(-20, 21)))
        if not self.known:
            return
        for turn, offsets in in_turn(patterns, _ROUNDS if self.few else len(patterns), self._bound):
            self.say(f"{mode}: {self._bound():.3f} ms a microbatch after {turn} rounds")
            self._improve_cuts(mode, self.known[-1].replicas)
            rows = self._near(mode, where, offsets)
            with suppress(TooManyPairs):
                self._keep(self._through(rows, self._bound(), self.budget))

    def _improve_cuts(self, mode: str, replicas: tuple[int, ...]) -> None:
        """The best cuts of the mode for given replicas, if they were not looked for before."""
        if (mode, replicas) in self.improved:
            return
        self.improved.add((mode, replicas))
        workers = self.setting.workers(len(replicas), replicas)
        try:
            self._keep([*partitions(self.profile, workers, (mode,), budget=self.budget // 4, rounds=4).values()])
        except TooLittleMemory:
            return

    def _near(self, mode: str, where: Positions, offsets: Sequence[int]) -> Places:
        """Boundaries around those of the best plan, and shared ones, so that replicas can change place."""
        layers = window(self.costs, where, mode, boundaries(self.known[-1].cuts), offsets)[1:-1]
        return _inner(self.costs, np.concatenate([*layers, _thinned(self.costs, where, 200 if self.few else _FEW)]))


def _inner(costs: CostModel, rows: Places) -> Places:
    """The rows that may be between two workers, each once."""
    between = (rows[:, :3] > 0).any(axis=1) & (rows[:, :3] < costs.count).any(axis=1)
    return np.unique(rows[between], axis=0)


def _thinned(costs: CostModel, where: Positions, few: int) -> Places:
    """At most `few` shared boundaries, with about equal work between neighbours."""
    at = where.shared[1:-1]
    rows = np.stack([at, at, at, 0 * at], axis=1).astype(np.int64)
    if len(rows) <= few:
        return rows
    load = costs.load(rows)
    chosen = np.searchsorted(load, np.linspace(load[0], load[-1], few))
    return rows[np.unique(np.minimum(chosen, len(rows) - 1))]
