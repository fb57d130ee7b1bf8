"""torch.distributed.pipelining on two workers, split where all stages take the same measured time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from sides import Batch, Task
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

WORKERS = 2
REPETITIONS = 5
SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
CONTIGUOUS = {"layout_optimization": False}
"""For inductor: it stores images channels last, which gloo refuses to send."""


class Stages:
    """A worker of a schedule.

    Args:
        settings: `schedule`, one of `SCHEDULES` [1f1b]; `stages` of a worker [1; zbv: 2]; `microbatches`; `compiled`,
            whether by torch.compile; `pieces`, what `piece_seconds` found.
    """

    def __init__(self, task: Task, settings: dict[str, Any], rank: int) -> None:
        name, each = settings.get("schedule", "1f1b"), int(settings.get("stages", 1))
        count = each * WORKERS
        there = [rank, count - 1 - rank] if name == "zbv" else list(range(rank, count, WORKERS))
        self._first, self._last = 0 in there, count - 1 in there
        model = task.model()
        bounds = (0, *fair_splits(settings["pieces"], count), len(model))
        parts: dict[int, Any] = {k: model[bounds[k] : bounds[k + 1]] for k in there}
        self._optimizer = task.optimizer([(f"{k}.{n}", p) for k in there for n, p in parts[k].named_parameters()])
        if settings.get("compiled"):
            parts = {k: torch.compile(part, options=CONTIGUOUS) for k, part in parts.items()}
        stages: list[Any] = [PipelineStage(parts[k], k, count, torch.device("cpu")) for k in there]
        given = stages[0] if name == "1f1b" else stages
        self._schedule = SCHEDULES[name](given, int(settings["microbatches"]), loss_fn=task.criterion)
        self._losses: list[Tensor] = []

    def step(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        targets = {"target": batch[1], "losses": losses} if self._last else {}
        self._schedule.step(*(batch[:1] if self._first else ()), **targets)
        self._losses += [torch.stack(losses).detach().mean()] if self._last else []
        self._optimizer.step()

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]


def fair_splits(seconds: Sequence[float], parts: int) -> tuple[int, ...]:
    """The first pieces of all parts but the first, so that the slowest part takes least."""

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in pairwise((0, *cuts, len(seconds))))

    return min(combinations(range(1, len(seconds)), parts - 1), key=slowest)


def piece_seconds(task: Task) -> list[float]:
    """Of each piece of the model, the measured forward, backward and update."""
    model = task.model()
    updates = [task.optimizer(list(piece.named_parameters())) if list(piece.parameters()) else None for piece in model]
    rounds = [_times(task, model, updates, task.train_data()[0]) for _ in range(REPETITIONS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _times(
    task: Task, model: nn.Sequential, updates: Sequence[torch.optim.Optimizer | None], batch: Batch
) -> list[float]:
    """Seconds of each piece."""
    taken = [0.0] * len(model)
    value, given, made = batch[0], [], []
    for number, piece in enumerate(model):
        given.append(value.detach().requires_grad_(number > 0))
        begin = time.perf_counter()
        value = piece(given[-1])
        taken[number] = time.perf_counter() - begin
        made.append(value)
    logits = value.detach().requires_grad_()
    task.criterion(logits, batch[1]).backward()
    gradient = logits.grad
    for number, update in reversed(list(enumerate(updates))):
        begin = time.perf_counter()
        made[number].backward(gradient)
        if update is not None:
            update.step()
            update.zero_grad()
        taken[number] += time.perf_counter() - begin
        gradient = given[number].grad
    return taken
