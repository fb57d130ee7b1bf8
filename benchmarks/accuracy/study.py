"""What the study consists of: every training run, prediction error and check, and how each is found again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from eager import EagerCheck
from grids import CodecGrid, Grid, Method, Pair, rates
from prediction import PredictionError
from training import FLUSHED, NONE, SYNCHRONOUS, Run
from workloads import WORKLOADS

Job = Run | PredictionError | EagerCheck

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
CODED = (("gpt", "adamw"), ("vgg", "sgd"), ("lstm", "sgd"))
PREDICTED = (("transformer", "sgd"), ("transformer", "adamw"), ("gpt", "sgd"), ("gpt", "adamw"))

ALONE: Method = (SYNCHRONOUS, 1, 1)
CONTENDERS = ("spectrain+ef", "spectrain", "latest", "2bw+predict+ef")
OTHERS = ("2bw+predict", "2bw", "latest+ef", "stash", "pipeoptim", "lwp")
WHOLE = ("spectrain", "spectrain+ef", "latest", "stash", "pipeoptim", "lwp")
NEWER = ("spectrain+brake", "xgrad")
METHODS = (*CONTENDERS, *OTHERS, *NEWER)


@dataclass(frozen=True)
class Study:
    """Grids, the most important one first, of policies and of codecs, and what is asked of each workload once."""

    grids: tuple[Grid, ...]
    codecs: tuple[CodecGrid, ...] = ()
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
        codecs = tuple(dataclasses.replace(grid, pairs=kept(grid.pairs)) for grid in self.codecs)
        return Study(grids, codecs, kept(self.checks), kept(self.predicted))

    def of(self, methods: Sequence[str]) -> Study:
        """The same study of some of the policies; synchronous training stays."""
        kept = (*methods, SYNCHRONOUS, FLUSHED)
        grids = (
            dataclasses.replace(grid, methods=tuple(method for method in grid.methods if method[0] in kept))
            for grid in self.grids
        )
        codecs = tuple(grid for grid in self.codecs if grid.policy in kept)
        return dataclasses.replace(self, grids=tuple(grids), codecs=codecs)

    def of_codecs(self) -> Study:
        """What is studied of codecs alone: of the pairs whose learning rates are known already."""
        return Study((), self.codecs, (), ())


def _at(policies: Sequence[str], workers: int, microbatches: int) -> tuple[Method, ...]:
    return tuple((policy, workers, microbatches) for policy in policies)


MAIN = Grid(EIGHT, (ALONE, *_at(CONTENDERS[:2], 8, 8)))
FULL = Study(
    (
        MAIN,
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
        Grid(TWO, (*_at(NEWER, 8, 8), *_at(NEWER, 4, 1))),
    ),
    (
        CodecGrid(CODED, "spectrain", (8, 4), like=(MAIN, ("spectrain", 8, 8))),
        CodecGrid(CODED, FLUSHED, (8, 4), like=(MAIN, ALONE)),
    ),
)
TINY = (("vgg", "sgd"), ("transformer", "adamw"))
SHORT = Grid(
    TINY,
    (ALONE, *_at(METHODS, 4, 4), *_at(WHOLE[:1], 4, 1)),
    factors=(1.0,),
    seeds=(0,),
    fraction=0.1,
    points=5,
)
QUICK = Study(
    (SHORT,),
    (
        CodecGrid(TINY[:1], "spectrain", (4,), like=(SHORT, ("spectrain", 4, 4))),
        CodecGrid(TINY[:1], FLUSHED, (4,), like=(SHORT, ALONE)),
    ),
    checks=TINY,
    predicted=(),
)


def key(job: Job) -> str:
    """What a job's result is kept under: its kind and all its settings, a codec only where there is one."""
    settings = {name: value for name, value in dataclasses.asdict(job).items() if (name, value) != ("codec", NONE)}
    return json.dumps({"kind": type(job).__name__, **settings}, sort_keys=True)
