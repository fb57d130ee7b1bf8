"""Grids: which runs a part of the study has, of policies at several learning rates, and of codecs at one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from training import NONE, Run
from workloads import WORKLOADS

Pair = tuple[str, str]
Method = tuple[str, int, int]
"""A policy (or SYNCHRONOUS, or FLUSHED), the number of workers, and that of microbatches."""


class Results(Protocol):
    """What is known so far, by run."""

    def __contains__(self, run: Run) -> bool: ...
    def __getitem__(self, run: Run) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Grid:
    """Every pair trained by every method.

    The first seed is trained at every rate, the others at the rate that was the best for it.

    Attributes:
        pairs: (workload, optimizer).
        factors: the learning rates, in multiples of the workload's own.
        fraction: of a workload's steps that are trained.
    """

    pairs: tuple[Pair, ...]
    methods: tuple[Method, ...]
    factors: tuple[float, ...] = (0.3, 1.0, 3.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    fraction: float = 1.0
    points: int = 20

    def runs(self, results: Results) -> list[Run]:
        """The runs that are known to belong to it: all of the first seed, and the others' once these have results."""
        found = []
        for method in self.methods:
            for pair in self.pairs:
                first = self.first(pair, method)
                found += first
                best = best_first(first, results)[:1]
                found += [dataclasses.replace(run, seed=seed) for run in best for seed in self.seeds[1:]]
        return sorted(found, key=lambda run: self.seeds.index(run.seed))

    def first(self, pair: Pair, method: Method) -> list[Run]:
        """The runs of one condition and the first seed, one at each rate."""
        workload, optimizer = pair
        steps = max(1, round(self.fraction * WORKLOADS[workload].steps / self.points)) * self.points
        return [
            Run(workload, optimizer, *method, rate, self.seeds[0], steps, self.points)
            for rate in rates(workload, optimizer, self.factors)
        ]


@dataclass(frozen=True)
class CodecGrid:
    """Every pair trained with every codec, and without one, by one policy on several numbers of workers, M = N.

    All at one learning rate, which is not searched for: the best one for the first seed of a grid without codecs.

    Attributes:
        pairs: (workload, optimizer).
        policy: or FLUSHED.
        workers: numbers of them, the most important one first.
        like: the grid without codecs, and its method whose rate is taken.
    """

    pairs: tuple[Pair, ...]
    policy: str
    workers: tuple[int, ...]
    like: tuple[Grid, Method]
    codecs: tuple[str, ...] = ("int8", "int4")

    def runs(self, results: Results) -> list[Run]:
        """The runs of the pairs whose rate is known."""
        grid, method = self.like
        bests = [run for pair in self.pairs for run in best_first(grid.first(pair, method), results)[:1]]
        return [
            dataclasses.replace(best, method=self.policy, workers=workers, microbatches=workers, codec=codec, seed=seed)
            for workers in self.workers
            for best in bests
            for codec in (NONE, *self.codecs)
            for seed in grid.seeds
        ]


def best_first(runs: Sequence[Run], results: Results) -> list[Run]:
    """The runs of one condition and seed, best result first, those that diverged last; empty until all have results."""
    if any(run not in results for run in runs):
        return []
    sign = 1 if WORKLOADS[runs[0].workload].metric == "nats" else -1
    return sorted(runs, key=lambda run: sign * results[run].get("final", sign * float("inf")))


def rates(workload: str, optimizer: str, factors: Sequence[float]) -> list[float]:
    """The learning rates of a grid."""
    return [float(f"{factor * WORKLOADS[workload].rates[optimizer]:.3g}") for factor in factors]
