"""NCCL's rules, kept or broken by processes that have no GPU: its place is taken by gloo, and its devices are guarded.

- A send or receive is a kernel: it is over when the other end has launched its own, and not before.
- An exchange of replicas is a kernel, too: it is over when all replicas have launched theirs.
- What travels is on the device.
- A communicator has no tags: both ends must launch their messages in one order.
- Before every action the device may wait for all its kernels (an allocation, a kernel that is loaded, a callback that
  synchronises). If one waits for a process that waits for this one, that would never return.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pretended_streams
import torch
from torch import Tensor

from fxpipe.runtime.process import world
from fxpipe.runtime.wires import processes, replica_group
from fxpipe.runtime.wires.group import group_among
from fxpipe.runtime.wires.replica_group import ReplicaProcess
from fxpipe.runtime.wires.shared_memory import SWITCH
from fxpipe.runtime.worker.executor import Executor

PATIENCE = 8
"""Seconds after which a kernel is taken to wait for a process that waits for this one."""

STUCK = "the device waits for a kernel of NCCL, which waits for another process"
OTHER = "the ends of a communicator have launched different messages"
ELSEWHERE = "NCCL refuses what is not on the device"

MOST = 2
"""Communicators with one other process."""

device = torch.device("cpu")
"""Of the run."""

kernels: list[Kernel] = []
"""Those launched on this process's device since it last waited for all of them."""


class Kernel:
    """A send or a receive that was launched, and goes on whatever the process does.

    Args:
        end: returns when it is over.
    """

    def __init__(self, end: Callable[[], Any]) -> None:
        self._end = end
        self._found: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        kernels.append(self)

    def wait(self) -> Any:
        """Wait until it is over; what it has made."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), STUCK
        if self._error is not None:
            raise self._error
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._end()
        except BaseException as error:
            self._error = error


class Communicator:
    """Of two processes, over NCCL; messages with a tag are on one of their own."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._launched: Counter[int] = Counter()

    def send(self, tensors: list[Tensor], place: int, tag: int) -> Kernel:
        size, data = (tensor.cpu() for tensor in _named(tensors))
        group, there = self._group, self._tag(tag)
        work = [group.send([size], place, there), group.recv([torch.zeros(1)], place, there + 1)]
        work.append(group.send([data], place, there + 2))
        return Kernel(lambda: [each.wait() for each in work])

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> Kernel:
        expected, data = _named(tensors)
        there, size = self._tag(tag), torch.empty_like(expected)
        work = [self._group.recv([size], place, there), self._group.send([torch.zeros(1)], place, there + 1)]

        def end() -> None:
            for each in work:
                each.wait()
            if int(size) != int(expected):
                _broken(OTHER)
            self._group.recv([here := data.cpu()], place, there + 2).wait()
            data.copy_(here)

        return Kernel(end)

    def _tag(self, tag: int) -> int:
        self._launched[tag] += 1
        return 3 * (self._launched[tag] + 100_000 * tag)


class Replicas:
    """Of a worker, over NCCL."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._launched = 0

    def alltoall(self, taken: list[Tensor], given: list[Tensor]) -> Exchange:
        return self._exchange(given, taken)

    def broadcast(self, tensors: list[Tensor]) -> Exchange:
        """Whose kernel is over on the first replica when the others have theirs; they answer with a byte."""
        (data,) = tensors
        one, none = data.new_zeros(1), data.new_zeros(0)
        count = self._group.size()
        if self._group.rank() == 0:
            return self._exchange([data] * count, [none, *(one.clone() for _ in range(count - 1))])
        return self._exchange([one, *[none] * (count - 1)], [data, *[none] * (count - 1)])

    def _exchange(self, given: list[Tensor], taken: list[Tensor]) -> Exchange:
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
    """Have this process's messages go through 'shared' or 'peer' memory, over 'gloo' or 'nccl', or break its rules."""
    os.environ[SWITCH] = str(int(wires in ("shared", "peer")))
    if wires == "nccl":
        _take_place()
    if wires == "peer":
        pretended_streams.set_up()
    plant(fault)


def plant(fault: str) -> None:
    """Have this process break one of NCCL's rules; '': none."""
    if fault:
        FAULTS[fault]()


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
            while kernels:
                kernels.pop().wait()
            return execute(executor, *given)

        return then

    def backend(own: torch.device, *given: Any) -> str:
        global device
        device = own
        made.clear()
        return "nccl"

    def of_replicas(members: list[int], backend: str) -> Any:
        group = group_among(members, "gloo")
        return group and Replicas(group)

    def on_stream(make: Callable[..., None]) -> Callable[..., None]:
        def made(process: ReplicaProcess, *given: Any) -> None:
            make(process, *given)
            process._on_stream = True

        return made

    stream: list[Kernel] = []

    def begin(self: ReplicaProcess, worker: int, key: Any, run: Any, flat: Tensor, taken: bool = True) -> None:
        """As on a stream: the worker goes on, and the kernels of exchanges follow each other."""
        before = stream.pop() if stream else None

        def follow() -> Tensor:
            if before is not None:
                before._thread.join()
            with torch.no_grad():
                return self._counted((worker, key[0]), run, flat)

        stream.append(Kernel(follow))
        if taken:
            self._begun[worker, key] = stream[-1].wait

    world.common_backend = backend
    processes.group_among = among
    replica_group.group_among = of_replicas
    ReplicaProcess.__init__ = on_stream(ReplicaProcess.__init__)  # type: ignore[method-assign]
    ReplicaProcess.begin = begin  # type: ignore[method-assign]
    Executor.execute = guarded(Executor.execute)  # type: ignore[method-assign]


def _at_once() -> None:
    """Sends and receives are launched when they are posted, whatever the other end does: each line with a communicator
    of its own."""

    def launched(way: str) -> Callable[..., Any]:
        def launch(self: Any, data: Tensor) -> Kernel:
            group, place = self._communicator._group, self._communicator._place
            return getattr(group, way)([data], place, self._tag)

        return launch

    processes.NcclLine.send = launched("send")  # type: ignore[method-assign]
    processes.NcclLine.receive = launched("recv")  # type: ignore[method-assign]


def _any_order() -> None:
    """Receives of a communicator are launched as their lines come to them."""
    direction = processes.Communicator
    receive = direction.receive

    def in_any_order(self: Any, data: Tensor, number: int) -> Any:
        time.sleep(random.random() / 50)
        return receive(self, data, self._begun)

    direction.receive = in_any_order  # type: ignore[method-assign]


def _from_the_cpu() -> None:
    """Values that an operator leaves in the CPU's memory are sent as they are."""
    from fxpipe.passes.comm import _Wiring

    _Wiring._on_device = lambda self, node, home: node  # type: ignore[method-assign]


def _other_place() -> None:
    """Two of four processes launch exchanges of replicas where the results are taken, not where they are given."""
    begin = ReplicaProcess.begin
    late = os.environ.get("RANK") in ("1", "2")

    def later(self: ReplicaProcess, worker: int, key: Any, run: Any, flat: Tensor, taken: bool = True) -> None:
        if not (late and taken):
            begin(self, worker, key, run, flat, taken)
            return

        def take() -> Tensor:
            begin(self, worker, key, run, flat)
            return self.result(worker, key)

        self._begun[worker, key] = take

    ReplicaProcess.begin = later  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "at once": _at_once,
    "any order": _any_order,
    "from the CPU": _from_the_cpu,
    "other place": _other_place,
}
