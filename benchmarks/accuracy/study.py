"""What the study consists of: every training run, prediction error and check, and how each is found again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eager import EagerCheck
from prediction import PredictionError
from training import FLUSHED, SYNCHRONOUS, Run
from workloads import WORKLOADS

Job = Run | PredictionError | EagerCheck
Pair = tuple[str, str]
Method = tuple[str, int, int]
"""A policy (or SYNCHRONOUS, or FLUSHED), the number of workers, and that of microbatches."""

ALL = tuple((w.name, o) for w in WORKLOADS.values() for o in w.rates)
EIGHT = tuple(pair for pair in ALL if not pair[0].startswith(("deep_", "long_")))
SIXTEEN = tuple(pair for pair in ALL if pair[0] not in ("lstm", "deep_gpt", "long_gpt"))
LONG = (("long_gpt", "adamw"),)
FOUR = tuple(pair for pair in EIGHT if pair[1] != "muon" and not pair[0].endswith("_gn"))
TWO = (("resnet_gn", "sgd"), ("lstm", "sgd"), ("transformer", "adamw"), ("gpt", "adamw"))
FEW = (*TWO, ("gpt", "muon"))
FEW_SIXTEEN = tuple(pair for pair in FEW if pair in SIXTEEN)
THIRTY_TWO = (("snn", "sgd"), ("deep_gpt", "adamw"))
NORMS = tuple(pair for pair in EIGHT if pair[0].startswith(("vgg", "resnet")))
PREDICTED = (("transformer", "sgd"), ("transformer", "adamw"), ("gpt", "sgd"), ("gpt", "adamw"))

ALONE: Method = (SYNCHRONOUS, 1, 1)
CONTENDERS = ("spectrain+ef", "spectrain", "latest", "2bw+predict+ef")
OTHERS = ("2bw+predict", "2bw", "latest+ef", "stash", "pipeoptim", "lwp")
WHOLE = ("spectrain", "spectrain+ef", "latest", "stash", "pipeoptim", "lwp")
METHODS = (*CONTENDERS, *OTHERS)


class Results(Protocol):
    """What is known so far, by job."""

    def __contains__(self, job: Job) -> bool: ...
    def __getitem__(self, job: Job) -> dict[str, Any]: ...


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
        for first in self._firsts():
            found += first
            found += [
                dataclasses.replace(run, seed=seed) for run in best_first(first, results)[:1] for seed in self.seeds[1:]
            ]
        return sorted(found, key=lambda run: self.seeds.index(run.seed))

    def _firsts(self) -> list[list[Run]]:
        return [
            [
                Run(w, o, method, workers, microbatches, rate, self.seeds[0], self._steps(w), self.points)
                for rate in rates(w, o, self.factors)
            ]
            for method, workers, microbatches in self.methods
            for w, o in self.pairs
        ]

    def _steps(self, workload: str) -> int:
        return max(1, round(self.fraction * WORKLOADS[workload].steps / self.points)) * self.points


def best_first(runs: Sequence[Run], results: Results) -> list[Run]:
    """The runs of one condition and seed, best result first, those that diverged last; empty until all have results."""
    if any(run not in results for run in runs):
        return []
    sign = 1 if WORKLOADS[runs[0].workload].metric == "nats" else -1
    return sorted(runs, key=lambda run: sign * results[run].get("final", sign * float("inf")))


def rates(workload: str, optimizer: str, factors: Sequence[float]) -> list[float]:
    """The learning rates of a grid."""
    return [float(f"{factor * WORKLOADS[workload].rates[optimizer]:.3g}") for factor in factors]


@dataclass(frozen=True)
class Study:
    """Grids, the most important one first, and what is asked of each workload once."""

    grids: tuple[Grid, ...]
    checks: tuple[Pair, ...] = ALL
    predicted: tuple[Pair, ...] = PREDICTED

    def once(self) -> list[Job]:
        """The checks against eager PyTorch, and the prediction errors."""
        return [
            *(EagerCheck(w, o, rates(w, o, (0.3,))[0], steps=10) for w, o in self.checks),
            *(
                PredictionError(w, o, WORKLOADS[w].rates[o], seed, WORKLOADS[w].steps, every=10)
                for w, o in self.predicted
                for seed in (0, 1, 2)
            ),
        ]

    def only(self, workloads: Sequence[str]) -> Study:
        """The same study of some of the workloads."""

        def kept(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
            return tuple(pair for pair in pairs if pair[0] in workloads)

        grids = tuple(dataclasses.replace(grid, pairs=kept(grid.pairs)) for grid in self.grids)
        return Study(grids, kept(self.checks), kept(self.predicted))

    def of(self, methods: Sequence[str]) -> Study:
        """The same study of some of the policies; synchronous training stays."""
        kept = (*methods, SYNCHRONOUS, FLUSHED)
        grids = (
            dataclasses.replace(grid, methods=tuple(method for method in grid.methods if method[0] in kept))
            for grid in self.grids
        )
        return dataclasses.replace(self, grids=tuple(grids))


def _at(policies: Sequence[str], workers: int, microbatches: int) -> tuple[Method, ...]:
    return tuple((policy, workers, microbatches) for policy in policies)


FULL = Study(
    (
        Grid(EIGHT, (ALONE, *_at(CONTENDERS[:2], 8, 8))),
        Grid(NORMS, _at(("spectrain",), 8, 1)),
        Grid((("deep_lstm", "sgd"), ("deep_gpt", "adamw")), (ALONE,)),
        Grid(THIRTY_TWO, _at(CONTENDERS[:2], 32, 32)),
        Grid(SIXTEEN, _at(CONTENDERS[:2], 16, 16)),
        Grid(LONG, (ALONE, (FLUSHED, 8, 8), *_at(CONTENDERS[:2], 8, 8)), factors=(1.0,), seeds=(0,)),
        Grid(TWO, _at(CONTENDERS[:2], 2, 1)),
        Grid(FOUR, _at(WHOLE, 4, 1)),
        Grid(EIGHT, _at(("latest",), 8, 8)),
        Grid(FEW, (*_at(WHOLE, 8, 1), *_at(("2bw+predict+ef",), 8, 8))),
        Grid(NORMS, (*_at(("spectrain",), 8, 2), *_at(("spectrain",), 8, 4))),
        Grid(FEW, _at(CONTENDERS[:2], 8, 4)),
        Grid(FEW_SIXTEEN, _at(CONTENDERS[:3], 16, 1), seeds=(0,)),
        Grid(THIRTY_TWO, _at(CONTENDERS[:3], 32, 1), seeds=(0,)),
        Grid(FEW, _at(OTHERS, 8, 8), seeds=(0,)),
        Grid(FEW_SIXTEEN, _at(CONTENDERS[2:], 16, 16), seeds=(0,)),
        Grid(THIRTY_TWO, _at(CONTENDERS[2:], 32, 32), seeds=(0,)),
        Grid(FOUR, (*_at(WHOLE, 8, 1), *_at(("2bw",), 8, 8))),
    )
)
QUICK = Study(
    (
        Grid(
            (("vgg", "sgd"), ("transformer", "adamw")),
            (ALONE, *_at(METHODS, 4, 4), *_at(WHOLE, 4, 1)),
            factors=(1.0,),
            seeds=(0,),
            fraction=0.25,
            points=5,
        ),
    ),
    checks=(("vgg", "sgd"), ("transformer", "adamw")),
    predicted=(),
)


def key(job: Job) -> str:
    """What a job's result is kept under: its kind and all its settings."""
    return json.dumps({"kind": type(job).__name__, **dataclasses.asdict(job)}, sort_keys=True)
