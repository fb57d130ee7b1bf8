"""The ranks of a run in threads of one process, over wires as strict as wires may be."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.observe.pulse import Pulse
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.mesh import MESH, Mesh
from fxpipe.plan.spec import EdgeSpec
from fxpipe.policy.recipe import choose
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.losses import Losses
from fxpipe.runtime.process.minibatch_notes import ComingShapes, several_shapes
from fxpipe.runtime.process.new_shapes import NewShapes
from fxpipe.runtime.process.training_loop import Limit, LimitedRow, train
from fxpipe.runtime.wires.addresses import Addresses, ProcessLine, Way
from fxpipe.runtime.wires.board import DictBoard
from fxpipe.runtime.wires.one_process import Loopback, Passing, Turns
from fxpipe.runtime.wires.wired import WiredTransport
from fxpipe.runtime.worker.assembly import open_worker
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.stages.minibatch import ShapedMinibatches
from fxpipe.task.hooks import Hooks
from fxpipe.task.model_file import Task


class Message:
    """A send or a receive: over once both ends are there."""

    here = False

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.over = threading.Event()

    def wait(self, what: object = None) -> None:
        assert self.over.wait(10), "deadlock"

    def take(self) -> Tensor:
        return self.flat


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
        mesh: of the plan.
    """

    def __init__(self, hub: Hub, rank: int, by_channel: bool, mesh: Mesh = MESH) -> None:
        self.hub, self.rank, self.ordered, self.mesh = hub, rank, by_channel, mesh
        self.loopback = Loopback()

    def isend(self, value: Tensor, way: Way) -> Message | None:
        target = self.mesh.process_of(way.worker, way.replica)
        if target == self.rank:
            self.loopback.send(way.line, value)
            return None
        time.sleep(random.random() * 2e-4)
        return self.hub.put(self.hub.sends, self.key(self.rank, target, way), value.as_strided((value.numel(),), (1,)))

    def irecv(self, count: int, dtype: torch.dtype, way: Way) -> Message | Passing:
        if (rank := self.mesh.process_of(way.worker, way.replica)) == self.rank:
            return self.loopback.expect(way.line)
        return self.hub.put(self.hub.receives, self.key(rank, self.rank, way), torch.empty(count, dtype=dtype))

    def stays(self, edge: EdgeSpec) -> bool:
        return self.mesh.rank_of(edge.src) == self.mesh.rank_of(edge.dst)

    def key(self, source: int, target: int, way: Way) -> Any:
        return (source, target, way.channel if way.channel and self.ordered else way.line)


@dataclass
class ThreadedRun:
    """What `run_in_threads` leaves."""

    losses: list[float] = field(default_factory=list)
    executors: list[Executor] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def check(self, losses: list[float], state: dict[str, Tensor]) -> None:
        """Assert that it is the local run, bit for bit, and that nothing is left over."""
        assert not self.failures
        assert self.losses == losses
        for executor in self.executors:
            for name, value in executor.store.parameters.items():
                assert torch.equal(value, state[name]), name
            assert not executor.store.versions._held
            assert not executor.transport._posted  # type: ignore[attr-defined]


def run_in_threads(
    folder: Path,
    data: list[Any],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    by_channel: bool,
    schedule: str | None = None,
    options: PipelineOptions = PipelineOptions(),  # noqa: B008 (it is frozen)
) -> ThreadedRun:
    """Train a build on `data`, a thread a rank; every message that was sent was received."""
    plan = read_plan(folder)
    recipe = choose(plan, schedule, options.policy)
    hub = Hub()
    task = Task(Hooks(optimizer=optimizer))
    run = ThreadedRun()
    board = DictBoard()
    threads = []
    loopbacks: list[Loopback] = []
    of_worker: dict[int, Executor] = {}
    computing = torch.get_num_threads()

    def work(rank: int) -> None:
        torch.set_num_threads(computing)  # a number of this thread's own
        try:
            first = rank == 0
            own = [run.executors[worker] for worker in plan.hosted(rank)]
            line = ProcessLine.of(plan, rank)
            coming, limit = None, Limit(len(data), len(data))
            shapes = NewShapes(folder, plan, None, options, torch.device("cpu"), board, Pulse())
            split = ShapedMinibatches(plan, folder, own[0].buffers, None)
            shapes.attach(own, split if first else None)
            if several_shapes(plan, options):
                read = (lambda m: split(data[m], m)[0]) if first else None
                coming = ComingShapes(line, own, limit, read, shapes.prepare)
                for executor in own:
                    executor.shape_of = coming
                coming.begin()
            turns = Turns()
            losses = Losses(plan, line, own, turns, everywhere=False)
            train(
                own,
                LimitedRow(recipe.schedule, rank, limit, turns),
                losses,
                (lambda m: split(data[m], m)[1]) if first else None,
                (lambda step: run.losses.append(step.read().loss)) if first else None,
                [] if coming is None else [coming],
            )
            losses.settle()
            for executor in own:
                executor.transport.finish()
        except BaseException as error:
            run.failures.append(error)

    for rank in range(plan.ranks):
        addresses = Addresses(plan, recipe.demand)
        wires: Any = StrictWires(hub, rank, by_channel, plan.mesh)
        loopbacks.append(wires.loopback)
        own = []
        for worker in plan.hosted(rank):
            transport = WiredTransport.of_training(plan, worker, wires, addresses, recipe.schedule)
            own.append(open_worker(WorkerSetting(plan, worker, recipe, task, options), folder, transport))
            of_worker[worker] = own[-1]
        for executor in own:
            executor.store.begin(0, len(data))
        threads.append(threading.Thread(target=work, args=(rank,)))
    run.executors += [of_worker[worker] for worker in range(plan.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not run.failures:
        assert not any(hub.sends.values())
        assert not any(hub.receives.values())
        assert not any(loopback.left for loopback in loopbacks)
    return run
