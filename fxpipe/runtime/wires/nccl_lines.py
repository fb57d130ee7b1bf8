"""Kernels of NCCL, which all processes launch in one order, and the messages that are such kernels.

A send, a receive or a sum of NCCL is a kernel that runs until the other processes have launched theirs, too. Whatever
waits for the whole device waits for it: loading a kernel, an allocation, `torch.cuda.synchronize` in a user's callback.
And other kernels may wait for it, since streams share the hardware queues of a device. So a kernel must not be launched
before all processes are ready for it, and NCCL demands that all processes launch their kernels in the same order. They
first agree by notes over gloo. On a message, here with the kernel of a lower rank of the pipeline to the left:

    its value is made, or its memory free                    the same
                                            ← ready ─
    takes its lock                          ─ go →            takes its lock
    launches                                ← go ─            launches

On a sum of replicas, which are all of one rank, each sends each the same two notes:

    its vector is made                      ─ ready →
    takes its lock                          ─ go →
    launches

A process has one lock for all its kernels. While it holds the lock it waits only for locks of higher ranks, or, in the
one sum that is next in all of them, of its own. So no processes wait for each other in a circle. And all locks of a
kernel are held at some moment, which gives its place in the order.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxpipe.device_copies import mark


class JointLaunch:
    """Launches kernels that some processes have in common, when all of them are ready, in the order of all kernels.

    The lock is that of this process. They agree by notes in a group over gloo, with a tag that nothing else has.
    `below`, `level` and `above` are the others' ranks in it: processes of lower ranks of the pipeline, of this one and
    of higher ones.
    """

    def __init__(
        self,
        lock: threading.Lock,
        notes: Any,
        tag: int,
        below: Sequence[int] = (),
        level: Sequence[int] = (),
        above: Sequence[int] = (),
    ) -> None:
        self._lock, self._notes, self._tag = lock, notes, tag
        self._below, self._down, self._up = below, [*below, *level], [*level, *above]

    def launch(self, ready: Callable[[], None], begin: Callable[[], Any]) -> Any:
        """Launch a kernel; returns what `begin` returns. `ready` waits until this process is ready. Raises any error of
        these; of gloo if another process is gone."""
        ready()
        self._exchange(self._down, self._up)  # those above and on its level are ready
        self._exchange([], self._below)  # those below hold their locks
        with self._lock:
            self._exchange(self._up, self._up)  # those above and on its level hold theirs
            self._exchange(self._below, [])
            return begin()

    def _exchange(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Send notes without content to some processes, and receive them from others."""
        under_way = [self._notes.recv([torch.zeros(1)], source, self._tag) for source in sources]
        under_way += [self._notes.send([torch.zeros(1)], target, self._tag) for target in targets]
        for each in under_way:
            each.wait()


class Communicator:
    """One end of the communicator that all messages from one process to another share. The group of the two processes
    is over NCCL; `place` is the rank of the other one in it."""

    def __init__(self, group: Any, place: int) -> None:
        self._group, self._place = group, place
        self._error: Exception | None = None

    def begin(self, way: str, data: Tensor) -> Any:
        """Begin to `send` or `recv` a message, unless an earlier one could not: the other end may have begun it."""
        if self._error is not None:
            raise self._error
        try:
            return getattr(self._group, way)([data], self._place, 0)
        except Exception as error:
            self._error = error
            raise


class Meeting:
    """A message that begins when both ends are ready. `begin` waits for the other end, and begins."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._work: Future[Any] = Future()

    def meet(self) -> None:
        """Wait for the other end, and begin."""
        try:
            self._work.set_result(self._begin())
        except Exception as error:
            self._work.set_exception(error)

    def wait(self) -> None:
        """Wait until it has begun; the device's current stream waits until it is over. Raises any error of it; of
        torch.distributed or gloo if the other end is gone."""
        self._work.result().wait()


class NcclLine:
    """One end of a channel between two processes, whose messages keep their order.

    A thread holds the meetings while the worker computes. The agreement is that of the two processes, with notes of
    this line.
    """

    def __init__(self, communicator: Communicator, agreement: JointLaunch, device: torch.device) -> None:
        self._communicator, self._agreement, self._device = communicator, agreement, device
        self._meetings: queue.SimpleQueue[Meeting | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._meetings, device), name="fxpipe line", daemon=True).start()
        weakref.finalize(self, self._meetings.put, None)

    def send(self, data: Tensor) -> Meeting:
        """Send bytes; they must not change before the meeting is over."""
        return self._put("send", data)

    def receive(self, data: Tensor) -> Meeting:
        """Receive into memory that only this message uses."""
        return self._put("recv", data)

    def _put(self, way: str, data: Tensor) -> Meeting:
        communicator, agreement, ready = self._communicator, self._agreement, mark(self._device)
        meeting = Meeting(lambda: agreement.launch(ready, lambda: communicator.begin(way, data)))
        self._meetings.put(meeting)
        return meeting


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """In a new thread: inside, its current stream is one that nothing else uses, for NCCL's kernels to wait for."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _run(meetings: queue.SimpleQueue[Meeting | None], device: torch.device) -> None:
    """Hold meetings in order, until None. It has no reference to the line, which ends with its last user."""
    with own_stream(device):
        while (meeting := meetings.get()) is not None:
            meeting.meet()
            del meeting  # its memory is the worker's
