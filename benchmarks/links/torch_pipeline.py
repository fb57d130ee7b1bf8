"""torch.distributed.pipelining's 1F1B on two workers, split where both halves take the same measured time."""

from __future__ import annotations

import statistics
import time
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

    def close(self) -> None:
        """Nothing is under way."""


def fair_split(task: Task) -> int:
    """The first piece of the second half, by the measured forward, backward and update of every piece."""
    inputs, targets = task.train_data()[0]
    model = task.model()
    optimizers = [
        task.optimizer(list(piece.named_parameters())) if list(piece.parameters()) else None for piece in model
    ]
    seconds: list[list[float]] = [[] for _ in model]
    for _ in range(REPETITIONS):
        values = [inputs]
        taken = [0.0] * len(model)
        for number, piece in enumerate(model):
            begin = time.perf_counter()
            value = values[-1].detach()
            if value.is_floating_point() and number:
                value.requires_grad_()
            values[-1] = value
            values.append(piece(value))
            taken[number] += time.perf_counter() - begin
        task.criterion(logits := values[-1].detach().requires_grad_(), targets).backward()
        gradient = logits.grad
        for number, optimizer in reversed(list(enumerate(optimizers))):
            begin = time.perf_counter()
            values[number + 1].backward(gradient)
            gradient = values[number].grad
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            taken[number] += time.perf_counter() - begin
        for found, one in zip(seconds, taken, strict=True):
            found.append(one)
    medians = [statistics.median(found) for found in seconds]
    return min(range(1, len(model)), key=lambda k: max(sum(medians[:k]), sum(medians[k:])))


def of_split(model: nn.Sequential, split: int) -> tuple[int, int]:
    """Parameters of the two halves."""
    halves = (model[:split], model[split:])
    first, second = (sum(p.numel() for p in half.parameters()) for half in halves)
    return first, second
