"""Kernels of NCCL, which all processes launch in one order, and the messages that are such kernels.

A send, a receive or a sum of NCCL is a kernel that runs until the other processes have launched theirs, too. Whatever
waits for the whole device waits for it: loading a kernel, an allocation, `torch.cuda.synchronize` in a user's callback.
And other kernels may wait for it, since streams share the hardware queues of a device. So a kernel must not be launched
before all processes are ready for it, and NCCL demands that all processes launch their kernels in the same order. They
first agree by notes over gloo:

    lower rank: its value is made, or its memory free        higher rank: the same
                                            ← ready ─
    takes its lock                          ─ go →            takes its lock
    launches                                ← go ─            launches

A process has one lock for all its kernels. While it holds the lock it waits only for locks of higher ranks, so no
processes wait for each other in a circle. And all locks of a kernel are held at some moment, which gives its place in
the order.
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


class Notes:
    """Notes without content, to and from one other process.

    Args:
        group: over gloo.
        process: its rank in the group.
        tag: which nothing else has.
    """

    def __init__(self, group: Any, process: int, tag: int) -> None:
        self._group, self._process, self._tag = group, process, tag

    def send(self) -> None:
        self._group.send([torch.zeros(1)], self._process, self._tag).wait()

    def receive(self) -> None:
        self._group.recv([torch.zeros(1)], self._process, self._tag).wait()


class JointLaunch:
    """Launches kernels that some processes have in common, when all of them are ready, in the order of all kernels.

    Args:
        lock: of this process.
        notes: the group in which they agree, over gloo.
        members: their ranks in it, in rising order.
        own: this process's.
        tag: of the notes, which nothing else has.
    """

    def __init__(self, lock: threading.Lock, notes: Any, members: Sequence[int], own: int, tag: int) -> None:
        place = members.index(own)
        self._lock = lock
        self._below = Notes(notes, members[place - 1], tag) if place else None
        self._above = Notes(notes, members[place + 1], tag) if place + 1 < len(members) else None

    def launch(self, ready: Callable[[], None], begin: Callable[[], Any]) -> Any:
        """Launch a kernel; returns what `begin` returns.

        Args:
            ready: waits until this process is ready.
            begin: launches it.

        Raises:
            Exception: any error of these; from gloo if another process is gone.
        """
        below, above = self._below, self._above
        ready()
        if above is not None:
            above.receive()  # all above are ready
        if below is not None:
            below.send()
            below.receive()  # all below hold their locks
        with self._lock:
            if above is not None:
                above.send()
                above.receive()  # all above hold their locks
            if below is not None:
                below.send()
            return begin()


class Communicator:
    """One end of the communicator that all messages from one process to another share.

    Args:
        group: of the two processes, over NCCL.
        place: the rank of the other process in it.
    """

    def __init__(self, group: Any, place: int) -> None:
        self._group, self._place = group, place
        self._error: Exception | None = None

    def begin(self, way: str, data: Tensor) -> Any:
        """Begin to `send` or `recv` a message, unless an earlier one could not begin: the other end may have begun it.

        Raises:
            Exception: why a message could not begin.
        """
        if self._error is not None:
            raise self._error
        try:
            return getattr(self._group, way)([data], self._place, 0)
        except Exception as error:
            self._error = error
            raise


class Meeting:
    """A message that begins when both ends are ready.

    Args:
        begin: waits for the other end, and begins.
    """

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
        """Wait until it has begun; the device's current stream waits until it is over.

        Raises:
            Exception: any error of it; from torch.distributed or gloo if the other end is gone.
        """
        self._work.result().wait()


class NcclLine:
    """One end of a channel between two processes, whose messages keep their order.

    A thread holds the meetings while the worker computes.

    Args:
        agreement: of the two processes, with notes of this line.
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


def mark(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits for what the calling thread has launched on the device so far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event.synchronize


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
