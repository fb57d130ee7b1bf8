"""Saves and loads one state in three ways, in turn: as a checkpoint, with `torch.save`, and with DCP.

All three have weights and AdamW's state of the same layers, and one process with one thread of torch. Times to save end
when the disk has the files, times to load when a model and an optimizer that exist have the values. `cpu` is what all
threads take while files are written.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fxpipe
from fxpipe.checkpoint.shard import CheckpointWriter
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.runtime.process.checkpoints import ShardWriter
from fxpipe.runtime.process.device import reuse_freed_memory
from fxpipe.runtime.process.resume import Resumed, about_run, restore
from fxpipe.runtime.wires.board import DictBoard
from fxpipe.runtime.worker.captures import Captures
from fxpipe.runtime.worker.observer import Observer

SIZES = {"10 MB": (640, 2), "100 MB": (2048, 2), "2 GB": (4096, 10)}
"""Width, and how many layers; 12 bytes a weight."""

Row = dict[str, float]


def measure(size: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds by side and by what they were spent on, a list with one for each round; and the bytes of the state."""
    reuse_freed_memory()  # as the workers do
    torch.set_num_threads(1)
    ours = Ours(size, folder / "ours")
    sides = [ours, Plain(size, folder / "plain"), Distributed(size, folder / "distributed")]
    found: dict[str, list[Row]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            found[side.name].append(side.save() | side.load())
            shutil.rmtree(side.folder, ignore_errors=True)
    ours.close()
    width, layers = SIZES[size]
    return {"bytes": 12 * layers * width**2, "sides": found}


def layers_of(size: str) -> nn.Module:
    width, layers = SIZES[size]
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


class Ours(Observer):
    """A pipeline of two workers, with a flush after each step: there are no weights of minibatches in flight."""

    name = "fxpipe"

    def __init__(self, size: str, folder: Path) -> None:
        self.folder = folder
        self.batch = torch.randn(2, SIZES[size][0])
        build = fxpipe.compile(layers_of(size), loss, self.batch, workers=2, schedule="1f1b", cost="analytic")
        build = build.save(folder.with_name("build"))
        self.pipeline = build.local(optimizer=lambda named: adamw([p for _, p in named]))
        self.shelf = Shelf.of(folder)
        about = about_run(self.pipeline.job.options, self.pipeline.recipe, self.pipeline.plan)
        writer = CheckpointWriter(self.pipeline.plan, about)
        self.writer = ShardWriter(self.shelf, writer, DictBoard(), True, 1, [self], lambda saved: "")
        self.whole = threading.Event()
        self.captures = [Captures(executor, lambda step: True, {}, {}) for executor in self.pipeline.executors]

    def stops(self, step: int, saved: Path | None, then: str) -> None:
        """All is on the disk."""
        self.whole.set()

    def save(self) -> Row:
        self.pipeline.step(self.batch)
        self.whole.clear()
        begin = perf_counter()
        shards = [one.take() for one in self.captures]
        waits, cpu = perf_counter() - begin, process_time()
        for executor, shard in zip(self.pipeline.executors, shards, strict=True):
            assert shard is not None
            self.writer.put(executor, shard, last=True)
        self.whole.wait()
        return {"waits": waits, "save": perf_counter() - begin, "cpu": process_time() - cpu}

    def close(self) -> None:
        """End the thread that writes."""
        self.writer.finish()

    def load(self) -> Row:
        begin = perf_counter()
        path, manifest, _ = self.shelf.newest()
        chosen = perf_counter() - begin
        plan, executors = self.pipeline.plan, self.pipeline.executors
        checkpoint = Checkpoint.open(path, plan)
        for executor in executors:
            for name, value in checkpoint.read(plan.owned(executor.worker), "cpu"):
                executor.store.parameters[name].data = value
        restore(plan, executors, Resumed(path, manifest, True))
        return {"choose": chosen, "load": perf_counter() - begin}


class Plain:
    """`torch.save` of both state dictionaries in one file, then fsync."""

    name = "torch.save"

    def __init__(self, size: str, folder: Path) -> None:
        self.folder = folder
        self.model = layers_of(size)
        self.optimizer = adamw(self.model.parameters())
        loss(self.model, torch.randn(2, SIZES[size][0])).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> Row:
        self.folder.mkdir(parents=True)
        return _timed(self._save)

    def _save(self) -> None:
        with (self.folder / "state.pt").open("wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> Row:
        begin = perf_counter()
        state = torch.load(self.folder / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return {"load": perf_counter() - begin}


class Distributed(Plain):
    """torch.distributed.checkpoint of one process, which has the disk take its files by itself."""

    name = "DCP"

    def _save(self) -> None:
        dcp.save(self._state(), checkpoint_id=self.folder, no_dist=True)

    def load(self) -> Row:
        begin = perf_counter()
        state = self._state()
        dcp.load(state, checkpoint_id=self.folder, no_dist=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return {"load": perf_counter() - begin}

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def _timed(save: Callable[[], None]) -> Row:
    begin, cpu = perf_counter(), process_time()
    save()
    seconds = perf_counter() - begin
    return {"waits": seconds, "save": seconds, "cpu": process_time() - cpu}
