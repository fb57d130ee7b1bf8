"""Data parallelism: each of two workers has the whole model and half of the minibatch, or the first has all of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from sides import Batch, Task
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

FIRST_COMPRESSED = 2
"""PowerSGD's first update with compressed gradients: the earliest that it allows."""

ONE_BUCKET = 1 << 14
"""MB of PowerSGD's bucket. With several, its callbacks wait for each other on gloo's two threads, for ever."""


class Replica:
    """A worker of DistributedDataParallel, with its default buckets, whose messages overlap the backward.

    Args:
        settings: `hook` (`fp16` or `powersgd`, with `rank`); `accumulate`, the minibatches of an update, whose
            gradients are averaged; `rate`, a factor of the learning rate; `compiled`, whether by torch.compile.
        shares: of the minibatch; a worker without one does nothing.
        connected: whether there is any communication at all.
    """

    def __init__(
        self, task: Task, settings: dict[str, Any], rank: int, shares: int = 2, connected: bool = True
    ) -> None:
        self._task, self._rank, self._shares = task, rank, shares
        self._every = int(settings.get("accumulate", 1))
        model: Any = task.model()
        self._optimizer = task.optimizer(list(model.named_parameters()))
        bucket = ONE_BUCKET if settings.get("hook") == "powersgd" else None
        for group in self._optimizer.param_groups:
            group["lr"] *= settings.get("rate", 1.0)
        if settings.get("compiled"):
            model = torch.compile(model)  # inside DDP, by whose buckets it then cuts the graph
        self._parallel = DistributedDataParallel(model, bucket_cap_mb=bucket) if connected else None
        self._model = self._parallel or model
        if self._parallel is not None and settings.get("hook") == "fp16":
            self._parallel.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
        if self._parallel is not None and settings.get("hook") == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                dist.group.WORLD,
                matrix_approximation_rank=int(settings["rank"]),
                start_powerSGD_iter=FIRST_COMPRESSED,
            )
            self._parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self._losses: list[Tensor] = []

    def step(self, batch: Batch) -> None:
        if self._rank >= self._shares:
            return
        inputs, targets = (leaf.chunk(self._shares)[self._rank] for leaf in batch)
        updates = (len(self._losses) + 1) % self._every == 0
        silent = nullcontext() if updates or self._parallel is None else self._parallel.no_sync()
        with silent:
            loss = self._task.criterion(self._model(inputs), targets)
            (loss / self._every).backward()
        self._losses.append(loss.detach())
        if updates:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]
