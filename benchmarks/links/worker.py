"""One of the two processes: trains every contender in turn, as a file says, and writes how fast each was.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python worker.py ORDERS

What the file holds is `Orders`; what worker 0 writes is its answer: for each contender its losses, if `losses` says how
many minibatches to train for them, and for each round the seconds of a minibatch.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp import Replica
from joined import Stage
from sides import Batch, Side, Task, load_task
from torch_pipeline import Half, fair_split

SLOWEST, FASTEST = 2, 40
"""Minibatches, the fewest and the most, that are timed in a round."""

WARM_UP = 3
"""Minibatches before them: memory is touched first, DDP orders its buckets, PowerSGD begins, the pipeline fills."""


@dataclass(frozen=True)
class Orders:
    """What to do.

    Attributes:
        task: the model file.
        sides: of each contender `name`, `kind`, `settings` and `every`.
        rounds: of timing, every other one in the reverse order.
        seconds: of timing, about, for each contender in a round.
        losses: minibatches to train for the losses; 0 for none.
        split: where torch's pipelining splits the model; None: where `fair_split` says.
        answer: the file to write.
    """

    task: str
    sides: list[dict[str, Any]]
    rounds: int
    seconds: float
    losses: int
    split: int | None
    answer: str


class Worker:
    """This process."""

    def __init__(self, orders: Orders) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self._store, self._asked = dist.distributed_c10d._get_default_store(), 0
        self.orders = orders
        self.task: Task = load_task(Path(orders.task))
        self.batches: Sequence[Batch] = self.task.train_data()
        split = [orders.split or (fair_split(self.task) if self.rank == 0 else 0)]
        dist.broadcast_object_list(split)
        self.split = split[0]

    def run(self) -> dict[str, Any]:
        """Everything that is ordered."""
        sides = self.orders.sides
        losses = {side["name"]: self._losses(side) for side in sides} if self.orders.losses else {}
        seconds: dict[str, list[float]] = {side["name"]: [] for side in sides}
        for number in range(self.orders.rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                seconds[side["name"]].append(self._seconds(side))
        weights = sum(p.numel() * p.element_size() for p in self.task.model().parameters())
        batch = len(self.batches[0][0])
        return {"split": self.split, "batch": batch, "weights": weights, "losses": losses, "seconds": seconds}

    def _open(self, order: dict[str, Any]) -> Side:
        gc.collect()
        dist.barrier()
        settings = order["settings"]
        match order["kind"]:
            case "fxpipe":
                return Stage(self.task, settings)
            case "pipelining":
                return Half(self.task, {**settings, "split": self.split}, self.rank)
            case kind:
                return Replica(self.task, settings, self.rank, connected=kind == "ddp")

    def _losses(self, order: dict[str, Any]) -> list[float]:
        """The mean over the workers that know any."""
        side = self._open(order)
        for batch in itertools.islice(self._endless(), self.orders.losses):
            side.step(batch)
        own = side.losses()
        side.close()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, own)
        known = [row for row in found if row]
        if order["kind"] == "fxpipe":  # every worker is told the same
            return list(known[0])
        return [sum(row) / len(row) for row in zip(*known, strict=True)]

    def _seconds(self, order: dict[str, Any]) -> float:
        """Of a minibatch, by the clock of worker 0, which is not asked to wait for what is still under way."""
        side, every, batches = self._open(order), int(order["every"]), self._endless()
        stamps = [time.perf_counter()]
        for _ in range(max(WARM_UP, every)):
            side.step(next(batches))
            stamps.append(time.perf_counter())
        last = (stamps[-1] - stamps[-1 - every]) / every
        wished = min(FASTEST, max(SLOWEST, round(self.orders.seconds / last)))
        count = self._agreed(-(-wished // every) * every)
        for _ in range(every):  # after that word, which holds up the workers
            side.step(next(batches))
        begin = time.perf_counter()
        for _ in range(count):
            side.step(next(batches))
        taken = time.perf_counter() - begin
        side.close()
        return taken / count

    def _agreed(self, count: int) -> int:
        """Worker 0's number: not by the process group, which fxpipe keeps out of sight while it trains."""
        self._asked += 1
        key = f"links/{self._asked}"
        if self.rank == 0:
            self._store.set(key, str(count))
        return int(self._store.get(key))

    def _endless(self) -> Iterator[Batch]:
        return itertools.cycle(self.batches)


def main() -> None:
    torch.set_num_threads(1)
    orders = Orders(**json.loads(Path(sys.argv[1]).read_text()))
    worker = Worker(orders)
    answer = worker.run()
    dist.barrier()
    if worker.rank == 0:
        Path(orders.answer).write_text(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
