"""Workers in threads over wires as strict as wires may be: the local run's bits, and no deadlock."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.batch import Splitter
from fxpipe.folder import read_plan
from fxpipe.runtime.assembly import choose, open_worker
from fxpipe.runtime.distributed import DistTransport
from fxpipe.runtime.local import LocalPipeline
from fxpipe.runtime.loop import train
from fxpipe.schedule import check

STEPS = 12


class Message:
    """A send or a receive: over once both ends are there."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.over = threading.Event()


class Hub:
    """Pairs sends and receives per (source, target, line), in their order; copies as late as possible."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sends: dict[Any, deque[Message]] = defaultdict(deque)
        self.receives: dict[Any, deque[Message]] = defaultdict(deque)

    def put(self, queue: Any, key: Any, flat: Tensor) -> Message:
        message = Message(flat)
        with self.lock:
            queue[key].append(message)
            while self.sends[key] and self.receives[key]:
                sent, received = self.sends[key].popleft(), self.receives[key].popleft()
                received.flat.copy_(sent.flat)
                sent.over.set()
                received.over.set()
        return message


class StrictWires:
    """`Wires` without processes: a send is over only when its receive was posted.

    Args:
        by_channel: as with NCCL, all edges of a channel share one line and must keep its order.
    """

    def __init__(self, hub: Hub, worker: int, by_channel: bool) -> None:
        self.hub, self.worker, self.ordered = hub, worker, by_channel

    def isend(self, flat: Tensor, to: int, channel: Any, tag: int | None = None) -> Message:
        time.sleep(random.random() * 2e-4)
        return self.hub.put(self.hub.sends, self.key(self.worker, to, channel, tag), flat)

    def irecv(self, count: int, dtype: torch.dtype, source: int, channel: Any, tag: int | None = None) -> Message:
        key = self.key(source, self.worker, channel, tag)
        return self.hub.put(self.hub.receives, key, torch.empty(count, dtype=dtype))

    def key(self, source: int, target: int, channel: Any, tag: int | None) -> Any:
        return (source, target, channel if self.ordered or tag is None else tag)

    def wait(self, message: Message) -> Tensor:
        self.finished(message)
        return message.flat

    def finished(self, message: Message) -> None:
        assert message.over.wait(10), "deadlock"


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "latest"},
        {"policy": "stash"},
        {"policy": "spectrain"},
        {"schedule": "1f1b", "microbatches": 2},
        {"schedule": "gpipe", "microbatches": 4},
        {"forward": (0, 1, 2, 3), "backward": (0, 1, 2, 3), "policy": "spectrain"},
        {"forward": (0, 0), "backward": (0, 0), "tied": False},
    ],
)
def test_threads_are_the_local_run(
    toy: Any, batches: Any, tmp_path: Path, options: dict[str, Any], by_channel: bool
) -> None:
    mixed = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True}
    folder = toy(**{**mixed, **options}).save(tmp_path / "build")
    data = (batches * 2)[:STEPS]
    plan = read_plan(folder)
    recipe = choose(plan)
    hub = Hub()
    losses: list[float] = []
    executors, threads, failures = [], [], []
    split = Splitter(plan.batch, plan.batch_spec, plan.microbatches)

    def work(worker: int) -> None:
        try:
            first = worker == 0
            train(
                plan,
                executors[worker],
                executors[worker].transport,
                recipe.schedule.until(worker, STEPS),
                (lambda m: split(data[m], m)) if first else None,
                (lambda m, loss, lr: losses.append(loss)) if first else None,
            )
            executors[worker].transport.finish()
        except BaseException as error:
            failures.append(error)

    in_flight = check(recipe.schedule, 10).in_flight[0]
    for worker in range(plan.workers):
        wires: Any = StrictWires(hub, worker, by_channel)
        transport = DistTransport(plan, worker, wires, recipe.demand, in_flight)
        executors.append(open_worker(plan, folder, worker, recipe, transport, sgd))
        executors[-1].store.begin(0, STEPS)
        threads.append(threading.Thread(target=work, args=(worker,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pipeline = LocalPipeline(folder, sgd)
    assert losses == pipeline.run(data)
    state = pipeline.state_dict()
    for executor in executors:
        for name, value in executor.store.parameters.items():
            assert torch.equal(value, state[name])
        assert not executor.store._copies
        assert not executor.transport._posted
    assert not any(hub.sends.values())
    assert not any(hub.receives.values())
