"""One of the two processes: trains every contender in turn, as a file says, and writes how fast each was.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python worker.py ORDERS

What the file holds is `Orders`; what worker 0 writes is its answer: for each contender its losses, if `losses` says how
many minibatches to train for them, and for each round the seconds of a minibatch.
"""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fxpipe_run
import torch
import torch.distributed as dist
from ddp import Replica
from sides import Batch, Side, Task, load_task
from torch_pipeline import WORKERS, Stages, piece_seconds

SLOWEST, FASTEST = 2, 40
"""Minibatches, the fewest and the most, that are timed in a round."""

WARM_UP = 3
"""Minibatches before them: memory is touched first, DDP orders its buckets, PowerSGD begins, the pipeline fills."""

SLOWEST_RUN, TIMED = 10, 0.8
"""Minibatches of a run of fxpipe, the fewest, and the share of them that is timed: those after the first fifth."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class Orders:
    """What to do.

    Attributes:
        task: the model file.
        sides: of each contender `name`, `kind`, `settings` and `every`.
        rounds: of timing, every other one in the reverse order.
        seconds: of timing, about, for each contender in a round.
        losses: minibatches to train for the losses; 0 for none.
        pieces: by what torch's pipelining splits the model; None: by `piece_seconds`.
        answer: the file to write.
    """

    task: str
    sides: list[dict[str, Any]]
    rounds: int
    seconds: float
    losses: int
    pieces: list[float] | None
    answer: str


class Worker:
    """This process."""

    def __init__(self, orders: Orders) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self._runs, self._known = 0, dict[str, float]()
        self.orders = orders
        self.task: Task = load_task(Path(orders.task))
        self.batches: Sequence[Batch] = self.task.train_data()
        pieces = [orders.pieces or (piece_seconds(self.task) if self.rank == 0 else None)]
        dist.broadcast_object_list(pieces)
        self.pieces = pieces[0]

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
        return {"pieces": self.pieces, "batch": batch, "weights": weights, "losses": losses, "seconds": seconds}

    def _ready(self) -> None:
        """Nothing is left of the contender before, in any process."""
        torch.set_num_threads(1)
        torch.compiler.reset()
        gc.collect()
        dist.barrier()

    def _open(self, order: dict[str, Any]) -> Side:
        self._ready()
        settings = order["settings"]
        match order["kind"]:
            case "pipelining":
                return Stages(self.task, {**settings, "pieces": self.pieces}, self.rank)
            case "whole":
                torch.set_num_threads(WORKERS)
                return Replica(self.task, settings, self.rank, shares=1, connected=False)
            case kind:
                return Replica(self.task, settings, self.rank, connected=kind == "ddp")

    def _losses(self, order: dict[str, Any]) -> list[float]:
        """The mean over the workers that know any."""
        if order["kind"] == "fxpipe":
            return self._of_first(fxpipe_run.losses, self._run(order, self.orders.losses))
        side = self._open(order)
        for batch in itertools.islice(self._endless(), self.orders.losses):
            side.step(batch)
        found: list[Any] = [None, None]
        dist.all_gather_object(found, side.losses())
        return [sum(row) / len(row) for row in zip(*(row for row in found if row), strict=True)]

    def _run(self, order: dict[str, Any], steps: int) -> Path:
        """The folder that a run of fxpipe wrote."""
        self._runs += 1
        out = Path(self.orders.answer).parent / f"out-{self._runs}"
        shutil.rmtree(out, ignore_errors=True)
        self._ready()
        fxpipe_run.run(order["settings"], steps, out)
        return out

    def _of_first(self, read: Callable[[Path], Found], out: Path) -> Found:
        """What worker 0 reads there."""
        found: list[Any] = [read(out) if self.rank == 0 else None]
        dist.broadcast_object_list(found)
        value: Found = found[0]
        return value

    def _seconds_of_run(self, order: dict[str, Any]) -> float:
        """Of a minibatch of fxpipe, of as many as the contender's last run lets expect; the first one is short."""
        name = order["name"]
        if name not in self._known:
            self._known[name] = self._of_first(fxpipe_run.seconds, self._run(order, 2 * SLOWEST_RUN))
        wished = round(self.orders.seconds / self._known[name] / TIMED)
        steps = min(FASTEST, max(SLOWEST_RUN, wished))
        self._known[name] = self._of_first(fxpipe_run.seconds, self._run(order, steps))
        return self._known[name]

    def _seconds(self, order: dict[str, Any]) -> float:
        """Of a minibatch, by the clock of worker 0, which is not asked to wait for what is still under way."""
        if order["kind"] == "fxpipe":
            return self._seconds_of_run(order)
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
        return taken / count

    def _agreed(self, count: int) -> int:
        """Worker 0's number."""
        found = [count]
        dist.broadcast_object_list(found)
        return found[0]

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
