"""One training run: a workload, an optimizer, a method, a number of workers, a learning rate and a seed."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from workloads import WORKLOADS, loss

import fxpipe
from fxpipe.runtime.process.pipeline import Pipeline
from fxpipe.runtime.worker.final_weights import final_tensors, held

SYNCHRONOUS = "synchronous"  # on one worker, the whole minibatch at once
FLUSHED = "1f1b"
NONE = "none"  # values are sent as they are
MOMENTUM = 0.9
DIVERGED = 1e3  # a training loss that is not below this will not come back

Point = tuple[int, float]


@dataclass(frozen=True)
class Run:
    """A training run: its fields are all that its result depends on.

    Attributes:
        optimizer: 'sgd' with momentum, 'adamw', or 'muon' for the matrices of the blocks with AdamW for the rest.
        method: a weight policy of the schedule `async`, SYNCHRONOUS, or FLUSHED, the same on many workers.
        seed: of the initial weights and of the order of the data.
        points: how often the held-out samples are looked at, the end included.
        codec: what packs the values that workers send, as `--codec` has it.
    """

    workload: str
    optimizer: str
    method: str
    workers: int
    microbatches: int
    rate: float
    seed: int
    steps: int
    points: int
    codec: str = NONE

    def execute(self) -> dict[str, Any]:
        """Train; the held-out metric along the way, or the step at which training diverged.

        The last point is that of the weights after a flush, when every worker has made every update. The others are
        snapshots.
        """
        begin = time.perf_counter()
        workload = WORKLOADS[self.workload]
        pipeline = pipeline_of(self)
        model = workload.make(self.seed)
        curve: list[Point] = []
        for step, batch in zip(range(1, self.steps + 1), workload.batches(self.seed), strict=False):
            if not float(pipeline.step(batch)) < DIVERGED:
                return {"diverged": step, "curve": curve, "seconds": time.perf_counter() - begin}
            if step == self.steps:
                pipeline.flush()
            if step % (self.steps // self.points) == 0:
                snapshot(pipeline, model)
                curve.append((step, workload.evaluate(model)))
        return {"final": curve[-1][1], "curve": curve, "seconds": time.perf_counter() - begin}


def pipeline_of(run: Run) -> Pipeline:
    """The run's pipeline before its first step, with its seed's initial weights."""
    schedule = FLUSHED if run.method == FLUSHED else "async"
    compiled = build(run.workload, run.workers, run.microbatches, schedule, run.codec)
    initial = WORKLOADS[run.workload].make(run.seed).state_dict()
    seeded = {name: initial.get(name, tensor) for name, tensor in compiled.tensors.items()}
    return dataclasses.replace(compiled, tensors=seeded).local(
        optimizer=lambda named: make_optimizer(run.optimizer, list(named), run.rate),
        lr_scheduler=lambda optimizer: make_scheduler(optimizer, run.steps),
        policy=None if run.method in (SYNCHRONOUS, FLUSHED) else run.method,
    )


@functools.cache
def build(workload: str, workers: int, microbatches: int, schedule: str, codec: str) -> fxpipe.Build:
    """A workload's build, compiled once a process for all seeds, methods and rates. One worker trains synchronously."""
    chosen = WORKLOADS[workload]
    return fxpipe.compile(
        chosen.make(seed=0),
        loss,
        next(chosen.batches(seed=0)),
        workers=workers,
        microbatches=microbatches,
        forward_at=chosen.cuts(workers),
        schedule=schedule if workers > 1 else "gpipe",
        accept_microbatch_loss=True,  # batch norm sees microbatches
        policy="latest",
        codec=codec,
        cost="analytic",
    )


class Several(torch.optim.Optimizer):
    """Optimizers of different parameters, as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()


def make_optimizer(name: str, named: Sequence[tuple[str, nn.Parameter]], rate: float) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW or Muon with PyTorch's defaults; Muon's steps are made as large as AdamW's."""
    parameters = [p for _, p in named]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=rate)
    matrices = [p for n, p in named if p.dim() == 2 and n.startswith("blocks.")]
    rest = [p for n, p in named if p.dim() != 2 or not n.startswith("blocks.")]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    if rest:
        made.append(torch.optim.AdamW(rest, lr=rate))
    return Several(*made)


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Up in a straight line over the first twentieth of the steps, down to nothing along a cosine."""
    rising = max(1, steps // 20)
    return LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / rising) * (1 + math.cos(math.pi * min(i / steps, 1))) / 2)


def snapshot(pipeline: Pipeline, model: nn.Module) -> None:
    """Copy what the workers hold at this moment into the model, without touching the pipeline.

    `state_dict()` would want a flush, and a flush in the middle changes an asynchronous run: the weights would no
    longer be stale for the next minibatches. So each parameter is its owner's live one. With N workers under `async`,
    worker k is then N−1−k updates behind the last one: the snapshot mixes versions, as the pipeline does.
    """
    found: dict[str, torch.Tensor] = {}
    for tensor in final_tensors(pipeline.plan):
        found |= dict.fromkeys(tensor.names, held(pipeline.executors[tensor.worker], tensor))
    model.load_state_dict(found)
