"""What a step takes on one GPU: eager PyTorch, emitted stages, engines; and what a communicator takes. See README.md.

All sides of a row take turns, so that a change of the machine's speed hits all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.costs.timer import clock_of
from fxpipe.engines import ENGINES, make
from fxpipe.errors import FxpipeError, first_line
from fxpipe.runtime.process.device import own_device
from fxpipe.runtime.wires.group import close_group, group_among, open_group, peers

HERE = Path(__file__).resolve().parent
COUNTS = (1, 4, 16)
COMMUNICATORS = 3
Step = Callable[[], Any]


class Block(nn.Module):
    """A block of a GPT, heads of 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Recurrent(nn.Module):
    """A layer of LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


MODELS: dict[str, Callable[[int], nn.Module]] = {"GPT block": Block, "LSTM": Recurrent}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def sgd(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1e-3, momentum=0.9)


def eager(model: nn.Module, batch: Tensor, count: int, autocast: str | None) -> Step:
    """A step of PyTorch with gradients summed over microbatches."""
    optimizer = sgd(list(model.named_parameters()))

    def step() -> None:
        optimizer.zero_grad()
        for part in batch.chunk(count):
            with torch.autocast(batch.device.type, torch.bfloat16, enabled=autocast is not None):
                value = loss(model, part)
            (value / count).backward()
        optimizer.step()

    return step


def sides(name: str, width: int, batch: Tensor, count: int, autocast: str | None) -> dict[str, Step | str]:
    """The steps to time by name, each run once; or why there is none."""
    torch.manual_seed(0)
    model = MODELS[name](width).to(batch.device)
    options: dict[str, Any] = {"workers": 1, "microbatches": count, "schedule": "1f1b", "autocast": autocast}
    build = fxpipe.compile(model, loss, batch, cost="analytic", **options)
    found: dict[str, Step | str] = {"eager PyTorch": eager(model, batch, count, autocast)}
    for engine in ENGINES:
        side = "emitted stages" if engine == "eager" else engine
        reason = None if engine == "eager" else make(engine).missing(batch.device.type)
        if reason is not None:
            found[side] = reason
            continue
        try:
            pipeline = build.local(optimizer=sgd, backend=engine)
            pipeline.step(batch)  # it builds, and compares itself with the emitted code
        except FxpipeError as error:
            found[side] = first_line(error)
        else:
            found[side] = lambda pipeline=pipeline: pipeline.step(batch)
    return found


def timed(steps: dict[str, Step], device: str, rounds: int, each: int) -> dict[str, float]:
    """The milliseconds of a step by side, medians over the rounds."""
    clock, found = clock_of(device), {side: list[float]() for side in steps}
    for _ in range(rounds + 1):
        for side, step in steps.items():
            begin = clock()
            for _ in range(each):
                step()
            found[side].append(1e3 * (clock() - begin) / each)
    return {side: statistics.median(times[1:]) for side, times in found.items()}  # the first is for warming up


def step_rows(device: str, quick: bool, rounds: int, each: int) -> list[dict[str, Any]]:
    """Time all models and numbers of microbatches, and print a table."""
    width, tokens, autocast = (768, 512, "bf16") if device == "cuda" and not quick else (64, 16, None)
    print(f"a step of 16 × {tokens} tokens, width {width}, {autocast or 'float32'}; ms, and eager PyTorch's over it\n")
    print("| model | microbatches | side | ms | times |\n|---|---|---|---|---|")
    rows = []
    for name in MODELS:
        for count in COUNTS[:1] if quick else COUNTS:
            found = sides(name, width, torch.randn(16, tokens, width, device=device), count, autocast)
            times = timed({s: step for s, step in found.items() if not isinstance(step, str)}, device, rounds, each)
            for side, step in found.items():
                row = {"model": name, "microbatches": count, "side": side, "ms": times.get(side)}
                rows.append(row if side in times else {**row, "why not": step})
                said = (
                    f"{times[side]:.2f} | {times['eager PyTorch'] / times[side]:.2f}" if side in times else f"{step} |"
                )
                print(f"| {name} | {count} | {side} | {said} |", flush=True)
    return rows


def communicators(device: str) -> list[dict[str, Any]]:
    """Set up communicators between two processes, which share a GPU, and print what each takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    wires = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
    started = []
    for rank in range(2):
        own = {**place, **wires, "RANK": rank, "NCCL_HOSTID": f"host{rank}"}  # NCCL refuses two processes of a host
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        command = [sys.executable, __file__, "--communicators", "--device", device]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    rows: list[dict[str, Any]] = json.loads(said[0])
    print("\n| communicator | seconds | MiB of the device, both processes |\n|---|---|---|")
    for number, row in enumerate(rows, 1):
        print(f"| {number} ({row['backend']}) | {row['seconds']:.3f} | {row['bytes'] / 2**20:.0f} |")
    return rows


def be_one_end(kind: str) -> None:
    """Be one of these processes; the first one prints what it found."""
    rank, device = int(os.environ["RANK"]), own_device(kind)
    clock, rows = clock_of(kind), []
    open_group(rank, 2, timedelta(minutes=5))
    backend, probe = "nccl" if kind == "cuda" else "gloo", torch.zeros(1, dtype=torch.uint8, device=device)
    for _ in range(COMMUNICATORS):
        with peers():
            dist.barrier()
            free, begin = _free(kind), clock()
            group = group_among([0, 1], backend)
            (group.recv if rank else group.send)([probe], 1 - rank, 0).wait()
            seconds = clock() - begin
            dist.barrier()
            rows.append({"backend": backend, "seconds": seconds, "bytes": free - _free(kind)})
    close_group()
    if rank == 0:
        print(json.dumps(rows))


def _free(kind: str) -> int:
    return torch.cuda.mem_get_info()[0] if kind == "cuda" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="of each side in each round")
    parser.add_argument("--quick", action="store_true", help="small, one microbatch, kept nowhere: to see that it runs")
    parser.add_argument("--communicators", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.communicators:
        be_one_end(options.device)
        return
    name = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU"
    print(f"{name}, torch {torch.__version__}")
    if options.device == "cpu":
        torch.set_num_threads(1)
    rounds, each = (1, 2) if options.quick else (options.rounds, options.steps)
    steps = step_rows(options.device, options.quick, rounds, each)
    result = {
        "device": name,
        "torch": torch.__version__,
        "steps": steps,
        "communicators": communicators(options.device),
    }
    if not options.quick and options.device == "cuda":
        (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
