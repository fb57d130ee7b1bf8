"""NCCL's rules, kept or broken by processes that have no GPU: its place is taken by gloo, and its devices are guarded.

- A send or receive is a kernel: it is over when the other end has launched its own, and not before.
- An exchange of replicas is a kernel, too: it is over when all replicas have launched theirs.
- What travels is on the device.
- A communicator has no tags: both ends must launch their messages in one order.
- All streams share one hardware queue: a kernel starts when all is over that its process has launched before it, and so
  does an action. This is the worst case: with more queues, or where the whole device waits (an allocation, a loaded
  kernel, a callback that synchronises), a kernel waits only for some of these. So an order of launches that blocks no
  process here blocks none on any device.
- At the end of a run all kernels are over.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any

import pretended_streams
import torch
from torch import Tensor

from fxpipe.runtime.process import world
from fxpipe.runtime.wires import processes, replica_group
from fxpipe.runtime.wires.group import group_among
from fxpipe.runtime.wires.nccl_lines import JointLaunch
from fxpipe.runtime.wires.replica_group import ReplicaProcess
from fxpipe.runtime.wires.shared_memory import SWITCH
from fxpipe.runtime.worker.executor import Executor

PATIENCE = 8
"""Seconds after which a kernel is taken to wait for a process that waits for this one."""

LEFT = "a kernel of NCCL was launched, and never ended"
STUCK = "the device waits for a kernel of NCCL, which waits for another process"
OTHER = "the ends of a communicator have launched different messages"
ELSEWHERE = "NCCL refuses what is not on the device"

MOST = 2
"""Communicators with one other process."""

device = torch.device("cpu")
"""Of the run."""

queues = 1
"""Hardware queues of a device."""

COMPUTE = 0
"""The stream of a worker's actions."""

streams = itertools.count(1)
"""All others: one for each communicator."""

launching = threading.Lock()
last: dict[int, Future[Any]] = {}
"""What was last launched into each queue."""

errors: list[BaseException] = []
"""Those of kernels."""


class Kernel:
    """What is launched on a stream: it starts when all is over that its queue has before it.

    Args:
        run: returns when it is over.
    """

    def __init__(self, stream: int, run: Callable[[], Any]) -> None:
        self._over: Future[Any] = Future()
        before = _launched(stream, self._over)
        threading.Thread(target=self._run, args=(before, run), daemon=True).start()

    def wait(self) -> Any:
        """Have the compute stream go on after it; what it has made."""
        compute(self._over)
        return self._over.result()

    def _run(self, before: list[Future[Any]], run: Callable[[], Any]) -> None:
        wait(before)
        try:
            self._over.set_result(run())
        except BaseException as error:
            errors.append(error)
            self._over.set_exception(error)


class QueuedStream(pretended_streams.Stream):
    """A stream of peer memory, in the queues of kernels."""

    def __init__(self, device: Any = None) -> None:
        self.of_copies = device is not None
        self._stream = next(streams) if self.of_copies else COMPUTE

    def launch(self, what: Callable[[], Any]) -> Kernel:
        return Kernel(self._stream, what)

    def synchronize(self) -> None:
        if wait([self.launch(lambda: None)._over], PATIENCE).not_done:
            _broken(STUCK)


def compute(*kernels: Future[Any]) -> None:
    """Wait for these kernels on the compute stream, and for what its queue has before that."""
    over: Future[Any] = Future()
    before = _launched(COMPUTE, over)
    missing = wait([*before, *kernels], PATIENCE).not_done
    over.set_result(None)
    if missing:
        _broken(STUCK)


def finish() -> None:
    """At the end of a run: all kernels are over, also those that nothing has waited for."""
    if wait(last.values(), PATIENCE).not_done:
        _broken(LEFT)
    if errors:
        raise errors[0]


def _launched(stream: int, over: Future[Any]) -> list[Future[Any]]:
    """Put a kernel into the queue of its stream; what it has to wait for."""
    with launching:
        before = last.get(stream % queues)
        last[stream % queues] = over
    return [] if before is None else [before]


class Communicator:
    """Of two processes, over NCCL; messages with a tag are on one of their own."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._streams: defaultdict[int, int] = defaultdict(lambda: next(streams))
        self._launched: Counter[int] = Counter()

    def send(self, tensors: list[Tensor], place: int, tag: int) -> Kernel:
        size, data = (tensor.cpu() for tensor in _named(tensors))
        group, there = self._group, self._tag(tag)

        def run() -> None:
            work = [group.send([size], place, there), group.recv([torch.zeros(1)], place, there + 1)]
            work.append(group.send([data], place, there + 2))
            for each in work:
                each.wait()

        return Kernel(self._streams[tag], run)

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> Kernel:
        expected, data = _named(tensors)
        group, there, size = self._group, self._tag(tag), torch.empty_like(expected)

        def run() -> None:
            for each in (group.recv([size], place, there), group.send([torch.zeros(1)], place, there + 1)):
                each.wait()
            if int(size) != int(expected):
                _broken(OTHER)
            group.recv([here := data.cpu()], place, there + 2).wait()
            data.copy_(here)

        return Kernel(self._streams[tag], run)

    def _tag(self, tag: int) -> int:
        self._launched[tag] += 1
        return 3 * (self._launched[tag] + 100_000 * tag)


class Replicas:
    """Of a worker, over NCCL."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._launched = 0

    def alltoall(self, taken: list[Tensor], given: list[Tensor]) -> Exchange:
        self._launched += 1
        own, tag = self._group.rank(), 3 * self._launched
        work = []
        for place, tensor in enumerate(given):
            if place != own:
                size, data = (part.cpu() for part in _named([tensor]))
                work += [self._group.send([part], place, tag + n) for n, part in enumerate((size, data))]
        for place, tensor in enumerate(taken):
            if place != own:
                expected, data = _named([tensor])
                self._group.recv([size := torch.empty_like(expected)], place, tag).wait()
                if int(size) != int(expected):
                    _broken(OTHER)
                self._group.recv([here := data.cpu()], place, tag + 1).wait()
                data.copy_(here)
        for each in work:
            each.wait()
        return Exchange()


class Exchange:
    """One that is over."""

    def wait(self) -> None:
        pass


def _named(tensors: list[Tensor]) -> list[Tensor]:
    """A message of bytes, after its size."""
    (data,) = tensors
    assert data.dtype == torch.uint8, f"NCCL may not know {data.dtype}"
    assert data.is_contiguous()
    if data.device.type != device.type:
        _broken(ELSEWHERE)
    return [torch.tensor([len(data)]), data]


def _broken(rule: str) -> None:
    print(rule, file=sys.stderr, flush=True)  # a thread keeps its error for the worker
    raise AssertionError(rule)


def use(wires: str, fault: str = "") -> None:
    """Have this process's messages go through 'shared' or 'peer' memory, over 'gloo' or 'nccl', or break its rules.

    'mixed': messages go through peer memory, and sums of replicas over NCCL.
    """
    os.environ[SWITCH] = str(int(wires in ("shared", "peer", "mixed")))
    if wires in ("nccl", "mixed"):
        _take_place()
    if wires == "mixed":
        pretended_streams.Stream = QueuedStream  # type: ignore[misc]
    if wires in ("peer", "mixed"):
        pretended_streams.set_up()
    plant(fault)


def plant(fault: str) -> None:
    """Have this process break one of NCCL's rules; '': none. 'two orders/32' does with 32 hardware queues."""
    global queues
    name, _, number = fault.partition("/")
    if name:
        FAULTS[name]()
    if number:
        queues = int(number)


def _take_place() -> None:
    made: list[tuple[int, ...]] = []

    def among(members: list[int], backend: str) -> Any:
        if backend != "nccl":
            return group_among(members, backend)
        made.append(tuple(members))
        assert made.count(tuple(members)) <= MOST
        group = group_among(members, "gloo")
        return None if group is None else Communicator(group)

    def guarded(execute: Callable[..., Any]) -> Callable[..., Any]:
        def then(executor: Executor, *given: Any) -> Any:
            compute()
            return execute(executor, *given)

        return then

    def backend(own: torch.device, *given: Any) -> str:
        global device
        device = own
        made.clear()
        return "nccl"

    def of_replicas(members: list[int], backend: str) -> Any:
        group = group_among(members, "gloo")
        return Replicas(group) if group is not None and backend == "nccl" else group

    stream = next(streams)

    def launch(self: ReplicaProcess, run: Callable[[Tensor], Tensor], flat: Tensor) -> Callable[[], Tensor]:
        return Kernel(stream, lambda: torch.no_grad()(run)(flat)).wait

    world.common_backend = backend
    processes.group_among = among
    replica_group.group_among = of_replicas
    ReplicaProcess._launch = launch  # type: ignore[method-assign]
    Executor.execute = guarded(Executor.execute)  # type: ignore[method-assign]


def _at_once() -> None:
    """Sends and receives are launched when they are posted, whatever the other end does: each line with a communicator
    of its own."""

    def launched(way: str) -> Callable[..., Any]:
        def launch(self: Any, data: Tensor) -> Kernel:
            group, place = self._communicator._group, self._communicator._place
            return getattr(group, way)([data], place, self._agreement._tag)

        return launch

    processes.NcclLine.send = launched("send")  # type: ignore[method-assign]
    processes.NcclLine.receive = launched("recv")  # type: ignore[method-assign]


def _any_order() -> None:
    """Messages are launched as their lines come to them."""
    _late()
    agree = JointLaunch.__init__

    def without_lock(self: Any, lock: Any, *given: Any, **others: Any) -> None:
        agree(self, nullcontext(), *given, **others)  # type: ignore[arg-type]

    JointLaunch.__init__ = without_lock  # type: ignore[method-assign]


def _two_orders() -> None:
    """The messages of a communicator have one order, those of several have not."""
    _late()
    connect = processes.ProcessWires._connect_two

    def with_own_lock(self: Any, *given: Any) -> None:
        self.launching = threading.Lock()
        connect(self, *given)

    processes.ProcessWires._connect_two = with_own_lock  # type: ignore[method-assign]


def _late() -> None:
    """Messages begin some time after they were agreed on."""
    begin = processes.Communicator.begin

    def later(self: Any, *given: Any) -> Any:
        time.sleep(random.random() / 50)
        return begin(self, *given)

    processes.Communicator.begin = later  # type: ignore[method-assign]


def _from_the_cpu() -> None:
    """Values that an operator leaves in the CPU's memory are sent as they are."""
    from fxpipe.passes.comm import _Wiring

    _Wiring._on_device = lambda self, node, home: node  # type: ignore[method-assign]


def _other_place() -> None:
    """Two of four processes launch exchanges of replicas where the results are taken, not where they are given."""
    begin = ReplicaProcess.begin
    late = os.environ.get("RANK") in ("1", "2")

    def later(self: ReplicaProcess, worker: int, key: Any, run: Any, flat: Tensor) -> None:
        if not late:
            begin(self, worker, key, run, flat)
            return

        def take() -> Tensor:
            begin(self, worker, key, run, flat)
            return self.result(worker, key)

        self._begun[worker, key] = take

    ReplicaProcess.begin = later  # type: ignore[method-assign]


def _sums_at_once() -> None:
    """Replicas do not agree on exchanges, which two of four processes launch later than the others among messages."""
    late = os.environ.get("RANK") in ("1", "2")
    make = ReplicaProcess.__init__

    def launch(ready: Callable[[], None], begin: Callable[[], Any]) -> Any:
        time.sleep(late / 10)
        return begin()

    def made(self: Any, *given: Any) -> None:
        make(self, *given)
        self._agreement.launch = launch

    ReplicaProcess.__init__ = made  # type: ignore[method-assign]


def _late_sums() -> None:
    """Two of four processes launch their kernels of a sum later than the others."""
    launch = ReplicaProcess._launch
    late = os.environ.get("RANK") in ("1", "2")

    def later(self: ReplicaProcess, *given: Any) -> Any:
        time.sleep(late * random.random() / 5)
        return launch(self, *given)

    ReplicaProcess._launch = later  # type: ignore[method-assign]


def _no_lock() -> None:
    """Messages through peer memory have no place in the order of kernels: found in every second run or so."""
    _late_sums()
    connect = processes.connected
    processes.connected = lambda *given: connect(*given[:-1])


def _left_over() -> None:
    """At the end a process launches a receive that has no send."""

    def close(self: Any) -> None:
        communicator = next(iter(self._lines.values()))._communicator
        communicator.begin("recv", torch.zeros(1, dtype=torch.uint8, device=device))

    processes.ProcessWires.close = close  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "at once": _at_once,
    "any order": _any_order,
    "two orders": _two_orders,
    "from the CPU": _from_the_cpu,
    "other place": _other_place,
    "sums at once": _sums_at_once,
    "late sums": _late_sums,
    "no lock": _no_lock,
    "left over": _left_over,
}
