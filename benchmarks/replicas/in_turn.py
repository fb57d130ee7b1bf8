"""DistributedDataParallel in the processes of a run of fxpipe, a step of each after every step of the run.

A model file of this benchmark has `InTurn(...)` as its `on_step`. Wherever the machine is slow, it is so for all three:
whole runs one after the other differ by 15% from round to round.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = "FXPIPE_BENCHMARK_REPLICAS"  # environment variables: of what is measured, a file for each process
STEPS = "FXPIPE_BENCHMARK_REPLICAS_STEPS"  # of the run
FXPIPE, COPIES, VIEWS = "fxpipe", "DDP", "DDP, gradients as views"


class InTurn:
    """Call it after each step of fxpipe's.

    Args:
        model, loss, optimizer, data: as in a model file.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss: Callable[[nn.Module, Any], Any],
        optimizer: Callable[[list[Any]], torch.optim.Optimizer],
        data: Callable[[], Sequence[Any]],
    ) -> None:
        self._task = model, loss, optimizer, data
        self._rows: list[dict[str, float]] = []
        self._losses: dict[str, list[float]] = {FXPIPE: [], COPIES: [], VIEWS: []}
        self._sides: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        self._ended: float | None = None

    def __call__(self, step: int, loss: float, run: Any) -> None:
        row = {} if self._ended is None else {FXPIPE: time.perf_counter() - self._ended}
        if not self._sides:
            self._begin()
        self._losses[FXPIPE].append(loss)
        batch = next(self._batches)
        order = [COPIES, VIEWS] if step % 2 else [VIEWS, COPIES]
        with self._group():
            for name in order:
                dist.barrier()
                begin = time.perf_counter()
                self._losses[name].append(self._train(name, batch))
                row[name] = time.perf_counter() - begin
            dist.barrier()
        if FXPIPE in row:
            self._rows.append(row)
        if step == int(os.environ[STEPS]):
            found = {"rows": self._rows, "losses": self._losses, "bytes": self._bytes}
            (Path(os.environ[FOLDER]) / f"{self._rank}.json").write_text(json.dumps(found))
        self._ended = time.perf_counter()

    def _begin(self) -> None:
        model, _, optimizer, data = self._task
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert not dist.is_initialized(), "fxpipe's own groups are not the user's"
        dist.init_process_group(
            "gloo", init_method=f"file://{os.environ[FOLDER]}/store", rank=self._rank, world_size=self._world
        )
        self._mine = dist.group.WORLD
        for name in (COPIES, VIEWS):
            side = DistributedDataParallel(model(), gradient_as_bucket_view=name == VIEWS)
            self._sides[name] = side, optimizer(list(side.module.named_parameters()))
        self._bytes = sum(parameter.nbytes for parameter in side.parameters())
        self._batches = itertools.cycle(data())
        dist.group.WORLD = None

    @contextlib.contextmanager
    def _group(self) -> Any:
        """torch.distributed as these two know it."""
        dist.group.WORLD = self._mine
        try:
            yield
        finally:
            dist.group.WORLD = None

    def _train(self, name: str, batch: Any) -> float:
        side, optimizer = self._sides[name]
        optimizer.zero_grad()
        loss = self._task[1](side, tuple(leaf.chunk(self._world)[self._rank] for leaf in batch))
        loss.backward()
        optimizer.step()
        found: float = loss.item()
        return found
