"""What the study consists of: every training run, prediction error and check, and how each is found again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from eager import EagerCheck
from prediction import PredictionError
from training import SYNCHRONOUS, Run
from workloads import WORKLOADS, Workload

METHODS = ("latest", "stash", "2bw", "spectrain", "pipeoptim", "lwp")
PREDICTED = (("transformer", "sgd"), ("transformer", "adamw"), ("gpt", "sgd"), ("gpt", "adamw"))

Job = Run | PredictionError | EagerCheck


@dataclass(frozen=True)
class Study:
    """A grid of runs.

    Attributes:
        pairs: (workload, optimizer).
        factors: the learning rates, in multiples of the workload's own.
        fraction: of a workload's steps that are trained.
    """

    methods: tuple[str, ...] = METHODS
    pairs: tuple[tuple[str, str], ...] = field(
        default_factory=lambda: tuple((w.name, o) for w in WORKLOADS.values() for o in w.rates)
    )
    workers: tuple[int, ...] = (4, 8)
    factors: tuple[float, ...] = (0.3, 1.0, 3.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    fraction: float = 1.0
    points: int = 20

    def jobs(self) -> list[Job]:
        """Everything to do. All of one seed comes before the next one, with the workloads in turn."""
        checks = [EagerCheck(w, o, self._rates(w, o)[0], steps=10) for w, o in self.pairs]
        errors = [
            PredictionError(w, o, WORKLOADS[w].rates[o], seed, self._steps(WORKLOADS[w]), every=10)
            for seed in self.seeds
            for w, o in PREDICTED
            if (w, o) in self.pairs
        ]
        runs = [
            Run(
                w, o, method, workers, microbatches(method, workers), rate, seed, self._steps(WORKLOADS[w]), self.points
            )
            for seed in self.seeds
            for place in range(len(self.factors))
            for method, workers in [(SYNCHRONOUS, 1), *((m, n) for n in self.workers for m in self.methods)]
            for w, o in self.pairs
            for rate in [self._rates(w, o)[place]]
        ]
        return [*checks, *errors, *runs]

    def only(self, workloads: Sequence[str]) -> Study:
        """The same study of some of the workloads."""
        return dataclasses.replace(self, pairs=tuple(pair for pair in self.pairs if pair[0] in workloads))

    def of(self, methods: Sequence[str]) -> Study:
        """The same study of some of the methods."""
        return dataclasses.replace(self, methods=tuple(method for method in self.methods if method in methods))

    def _rates(self, workload: str, optimizer: str) -> list[float]:
        return [float(f"{factor * WORKLOADS[workload].rates[optimizer]:.3g}") for factor in self.factors]

    def _steps(self, workload: Workload) -> int:
        return max(1, round(self.fraction * workload.steps / self.points)) * self.points


FULL = Study()
QUICK = Study(
    pairs=(("vgg", "sgd"), ("transformer", "adamw")),
    workers=(4,),
    factors=(1.0,),
    seeds=(0,),
    fraction=0.25,
    points=5,
)


def microbatches(method: str, workers: int) -> int:
    """Of a minibatch: double buffering needs at least N−1; all others train the minibatch as one."""
    return workers if method == "2bw" else 1


def key(job: Job) -> str:
    """What a job's result is kept under: its kind and all its settings."""
    return json.dumps({"kind": type(job).__name__, **dataclasses.asdict(job)}, sort_keys=True)
