"""Runs of several processes on CUDA devices, as torchrun starts them; they may share one device.

NCCL refuses two processes on a device, unless NCCL_HOSTID has it take them for two hosts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import Result, finish, free_port, fxpipe
from warm import Popen

from fxpipe.runtime.wires.shared_memory import SWITCH

MARKS = [
    pytest.mark.gpu,
    pytest.mark.multiproc,
    pytest.mark.skipif(not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device"),
]
WIRES = ("nccl", "peer memory")
"""What messages may go through; or 'gloo', which needs no device of one's own."""
DEVICE = "cuda"

MICROBATCHES = ("--schedule", "1f1b", "--microbatches", 4)
CUT = ("--fp-cut", "layers.3", "--bp-cut", "layers.3")
NET = f"""
import os
import time
from pathlib import Path

import torch
from torch import nn

DEVICE = {DEVICE!r}
WIDTH, INSIDE, BATCH, DROPOUT, TIED = 64, 64, 16, 0.0, False


class Net(nn.Module):  # no kernel of it adds up in an order of chance
    def __init__(self):
        super().__init__()
        widths = [WIDTH, WIDTH, WIDTH, INSIDE, WIDTH, WIDTH, WIDTH]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.drop = nn.Dropout(DROPOUT)
        if TIED:
            self.layers[5].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return x


def model():
    return Net()


def loss(model, batch):
    return model(batch).square().mean()


def size(step):
    return BATCH


def train_data():
    for step in range(40):
        yield torch.randn(size(step), WIDTH, device=DEVICE)  # from the device's own generator


def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=0.01)


def rank():
    return os.environ.get("RANK", "0")


def before(holder, name, act):
    if "WORLD_SIZE" not in os.environ:
        return  # the tests' own process
    call = getattr(holder, name)

    def then(*given, **more):
        act(*given)
        return call(*given, **more)

    setattr(holder, name, then)


def late(*given):
    torch.cuda._sleep(5_000_000)  # some milliseconds of the current stream

"""
"""Layers whose batches are drawn on the device. What is written after it sets its numbers, or has a process of a run do
something `before` calls of a function."""


def compiled(folder: Path, model: str, *options: object) -> Path:
    """The build of a model file, in the folder."""
    (folder / "model.py").write_text(model)
    result = fxpipe(
        *("compile", folder / "model.py", "--device", DEVICE, "--cost", "analytic", *options, "-o", folder / "build")
    )
    assert result.code == 0, result.err
    return folder / "build"


@contextmanager
def started(
    wires: str, ranks: int, *command: object, devices: int = 1, **environment: object
) -> Iterator[list[subprocess.Popen[str]]]:
    """The same Python command in so many processes, by rank; what is left of them is killed in the end.

    Args:
        wires: one of `WIRES`, or 'gloo'.
        devices: on which they are, in turns.
    """
    shared = {
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "LOCAL_WORLD_SIZE": devices,
        "NCCL_SOCKET_IFNAME": "=lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": 1,
        SWITCH: int(wires == "peer memory"),
        **environment,
    }
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            own = {**shared, "RANK": rank, "LOCAL_RANK": rank % devices}
            if wires != "gloo" and ranks > devices:
                own["NCCL_HOSTID"] = f"host{rank}"
            processes.append(
                Popen(
                    [sys.executable, *map(str, command)],
                    env={**os.environ, **{name: str(value) for name, value in own.items()}},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def results(wires: str, ranks: int, *command: object, **more: Any) -> list[Result]:
    """What the processes left, which all end well, by rank."""
    with started(wires, ranks, *command, **more) as processes:
        found = [finish(process, 180) for process in processes]
    assert [each.code for each in found] == [0] * ranks, found
    return found


def run_over(wires: str, folder: Path, ranks: int, *run: object, **more: Any) -> dict[str, Any]:
    """The summary of a run of the folder's build.

    Replicas of one worker send no messages: their sums go over NCCL.
    """
    found = results(wires, ranks, "-m", "fxpipe", "run", folder / "build", *run, "--json", **more)
    summary: dict[str, Any] = json.loads(found[0].out)
    assert summary["transport"] == ("nccl" if len(summary["workers"]) == 1 else wires)
    return summary


def run_here(folder: Path, *run: object) -> dict[str, Any]:
    """The summary of a run of the folder's build in this process, with `--local`."""
    summary: dict[str, Any] = fxpipe("run", folder / "build", *run, "--local", "--json").json
    return summary
