"""One of the two processes of torch.distributed.pipelining: trains with one schedule, and says how fast it was.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python torch_side.py MODEL SCHEDULE MICROBATCHES STEPS

Worker 0 prints the seconds of a minibatch, and the last worker's losses of all minibatches, as one JSON object. The
model is split where all stages take the same measured time (benchmarks/links/torch_pipeline.py); with two stages on
each worker stage k is on worker k mod 2, as torch's interleaved schedules want it.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "links"))
from sides import load_task
from torch_pipeline import fair_splits

STAGES = {"1f1b": 1, "interleaved-zb": 2, "zb": 1}
"""Of each schedule, the stages of a worker. torch's interleaved zero bubble takes one as well, and is then ZB1P."""


def main() -> None:
    path, name, microbatches, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task: Any = load_task(path)
    model, count = task.model(), STAGES[name] * world
    cuts: list[Any] = [fair_splits(task, count) if rank == 0 else None]
    dist.broadcast_object_list(cuts)
    bounds = [0, *cuts[0], len(model)]
    own = [k for k in range(count) if k % world == rank]
    parts = [nn.Sequential(*model[bounds[k] : bounds[k + 1]]) for k in own]
    optimizer = task.optimizer(
        [(f"{k}.{n}", p) for k, part in zip(own, parts, strict=True) for n, p in part.named_parameters()]
    )
    stages = [PipelineStage(part, k, count, torch.device("cpu")) for k, part in zip(own, parts, strict=True)]
    if name == "1f1b":
        schedule: Any = Schedule1F1B(stages[0], microbatches, loss_fn=task.criterion)
    else:
        schedule = ScheduleInterleavedZeroBubble(stages, microbatches, loss_fn=task.criterion)
    found: list[float] = []
    skip = max(2, steps // 5)
    begin = 0.0
    for number, (inputs, targets) in enumerate(itertools.islice(itertools.cycle(task.train_data()), steps)):
        if number == skip:
            begin = time.perf_counter()
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        last = count - 1 in own
        schedule.step(*([inputs] if 0 in own else []), **({"target": targets, "losses": losses} if last else {}))
        optimizer.step()
        found += [float(torch.stack(losses).detach().mean())] if last else []
    seconds = (time.perf_counter() - begin) / (steps - skip)
    told: list[Any] = [None] * world
    dist.all_gather_object(told, (seconds, found))
    if rank == 0:
        print(json.dumps({"seconds": max(s for s, _ in told), "losses": told[-1][1], "split": cuts[0]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
