"""One of the processes of torch's DistributedDataParallel: trains the eager model, and says how fast it was.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python ddp_side.py MODEL VIEWS STEPS

Process 0 prints the seconds of a minibatch, the losses of all minibatches (means over the processes' shares), and the
bytes of the trained weights, as one JSON object.
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
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "links"))
from sides import load_task


def main() -> None:
    path, views, steps = Path(sys.argv[1]), sys.argv[2] == "views", int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task: Any = load_task(path)
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view=views)
    optimizer = task.optimizer(list(model.module.named_parameters()))
    found: list[float] = []
    skip = max(1, steps // 5)
    begin = 0.0
    for number, batch in enumerate(itertools.islice(itertools.cycle(task.train_data()), steps)):
        if number == skip:
            begin = time.perf_counter()
        optimizer.zero_grad()
        loss = task.loss(model, tuple(leaf.chunk(world)[rank] for leaf in batch))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    seconds = (time.perf_counter() - begin) / (steps - skip)
    told: list[Any] = [None] * world
    dist.all_gather_object(told, (seconds, found))
    if rank == 0:
        losses = [sum(shares) / world for shares in zip(*(shares for _, shares in told), strict=True)]
        size = sum(parameter.nbytes for parameter in model.parameters())
        print(json.dumps({"seconds": max(s for s, _ in told), "losses": losses, "bytes": size}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
