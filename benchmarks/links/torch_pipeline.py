"""torch.distributed.pipelining's 1F1B on two workers, split where both halves take the same measured time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from sides import Batch, Task
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

REPETITIONS = 5


class Half:
    """A worker of Schedule1F1B.

    Args:
        settings: `microbatches`, and `split`, the first piece of the second half.
    """

    def __init__(self, task: Task, settings: dict[str, Any], rank: int) -> None:
        self._rank = rank
        split = int(settings["split"])
        model = task.model()
        half = model[:split] if rank == 0 else model[split:]
        self._optimizer = task.optimizer(list(half.named_parameters()))
        stage = PipelineStage(half, rank, 2, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, int(settings["microbatches"]), loss_fn=task.criterion)
        self._losses: list[Tensor] = []

    def step(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        if self._rank == 0:
            self._schedule.step(batch[0])
        else:
            losses: list[Tensor] = []
            self._schedule.step(target=batch[1], losses=losses)
            self._losses.append(torch.stack(losses).mean())
        self._optimizer.step()

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]


def fair_split(task: Task) -> int:
    """The first piece of the second half, by the measured forward, backward and update of every piece."""
    return fair_splits(task, 2)[0]


def fair_splits(task: Task, parts: int) -> tuple[int, ...]:
    """The first pieces of all parts but the first, so that the slowest part takes least: measured likewise."""
    model = task.model()
    updates = [task.optimizer(list(piece.named_parameters())) if list(piece.parameters()) else None for piece in model]
    rounds = [_times(task, model, updates, task.train_data()[0]) for _ in range(REPETITIONS)]
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(sum(medians[a:b]) for a, b in pairwise((0, *cuts, len(medians))))

    return min(combinations(range(1, len(model)), parts - 1), key=slowest)


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
