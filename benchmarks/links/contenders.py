"""Who competes: fxpipe, torch's pipelining, and data parallelism as its users tune it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

STEPS_ACCUMULATED = 4
RANK = 2
"""Of PowerSGD's approximations of gradients: the paper's (arXiv 1905.13727) for image nets."""


@dataclass(frozen=True)
class Contender:
    """One side of the comparison.

    Attributes:
        kind: the file that trains it: `fxpipe`, `pipelining` or `ddp`; `alone` is a worker's share of the minibatch,
            trained with nothing communicated; `whole` is all of it, in one process with a thread for each worker.
        settings: what that file reads.
        compile: for `fxpipe`, the flags of its build.
        every: minibatches of one update.
        like: the contender that trains the same but for rounding, which is checked, and so is as soon at the loss.
        rates: factors of the learning rate: the one that is first at the loss counts.
        group: of these, only the fastest counts; None: it counts for itself.
    """

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    compile: tuple[str, ...] = ()
    every: int = 1
    group: str | None = None
    like: str | None = None
    rates: tuple[float, ...] = (1.0,)


ALONE = Contender("alone", "alone")
ASYNC = Contender("fxpipe async", "fxpipe")
AUTO = f"{ASYNC.name}, auto"
DDP = Contender("DDP", "ddp")
PIPELINING = "torch 1F1B"

TUNED_DDP = (
    Contender("DDP, fp16 hook", "ddp", {"hook": "fp16"}),
    Contender("DDP, PowerSGD", "ddp", {"hook": "powersgd", "rank": RANK}),
    Contender(
        f"DDP, {STEPS_ACCUMULATED} accumulated",
        "ddp",
        {"accumulate": STEPS_ACCUMULATED},
        every=STEPS_ACCUMULATED,
        rates=(1.0, STEPS_ACCUMULATED**0.5, float(STEPS_ACCUMULATED)),
    ),
)


def contenders(codecs: Sequence[str], microbatches: Sequence[int], data_parallel: bool = True) -> list[Contender]:
    """All of them, in the order of the tables.

    Args:
        codecs: those that this fxpipe's `compile --codec` knows.
        microbatches: the counts that torch's pipelining tries.
        data_parallel: with DDP.
    """
    coded = [Contender(f"fxpipe async, {codec}", "fxpipe", compile=("--codec", codec)) for codec in codecs]
    flushed = ("--schedule", "1f1b")
    synchronous = [Contender("fxpipe 1f1b", "fxpipe", compile=flushed)]
    if "int8" in codecs:
        synchronous.append(Contender("fxpipe 1f1b, int8", "fxpipe", compile=(*flushed, "--codec", "int8")))
    torchs = [
        Contender(f"{PIPELINING}, {count}", "pipelining", {"microbatches": count}, group=PIPELINING)
        for count in microbatches
    ]
    return [ASYNC, *coded, *synchronous, *torchs, *((DDP, *TUNED_DDP) if data_parallel else ()), ALONE]
