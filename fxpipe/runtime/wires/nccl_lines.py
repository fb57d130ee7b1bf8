"""Messages over NCCL: each begins once both ends are ready for it.

NCCL's sends and receives are kernels: except for a few small messages, each runs until the other one has run, too.
Everything that waits for the whole device waits for them: loading a kernel, an allocation, `torch.cuda.synchronize` in
a user's callback. A worker that launches one before the other end is ready may block there while the other end waits
for this worker. So the ends first exchange notes over gloo:

    receiver: its memory is free      ─ ready →
                                      ← go, 7th ─      sender: its value is made
    receive, after the 6th                             send

The messages of a line keep their order. All lines from one process to another share a communicator, in which both ends
must begin messages in one order: the sender's, which its notes say.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class Communicator:
    """One end of the communicator that all messages from one process to another share.

    Args:
        group: of the two processes, over NCCL.
        place: the rank of the other process in it.
    """

    def __init__(self, group: Any, place: int) -> None:
        self._group, self._place = group, place
        self._begun = 0
        self._turn = threading.Condition()
        self._error: BaseException | None = None

    def send(self, data: Tensor, say: Callable[[int], int]) -> Any:
        """Begin to send, after saying which message of the communicator it is."""
        with self._turn:
            say(self._begun)
            self._begun += 1
            return self._group.send([data], self._place, 0)

    def receive(self, data: Tensor, number: int) -> Any:
        """Begin to receive a message of the communicator, after all before it.

        Raises:
            BaseException: what ended one of these.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._begun == number or self._error is not None)
            if self._error is not None:
                raise self._error
            self._begun += 1
            self._turn.notify_all()
            return self._group.recv([data], self._place, 0)

    def fail(self, error: BaseException) -> None:
        """A message could not begin, so that no later one can."""
        with self._turn:
            self._error = self._error or error
            self._turn.notify_all()


class Meeting:
    """A message that begins when both ends are ready.

    Args:
        begin: waits for the other end, and begins.
    """

    def __init__(self, communicator: Communicator, begin: Callable[[], Any]) -> None:
        self._communicator, self._begin = communicator, begin
        self._work: Future[Any] = Future()

    def meet(self) -> None:
        """Wait for the other end, and begin."""
        try:
            self._work.set_result(self._begin())
        except Exception as error:
            self._communicator.fail(error)
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
        notes: the group of all processes, over gloo.
        process: the rank of the other process in it.
        tag: of the notes, which nothing else has.
    """

    def __init__(self, communicator: Communicator, notes: Any, process: int, tag: int, device: torch.device) -> None:
        self._communicator = communicator
        self._notes, self._process, self._tag = notes, process, tag
        self._device = device
        self._meetings: queue.SimpleQueue[Meeting | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._meetings, device), name="fxpipe line", daemon=True).start()
        weakref.finalize(self, self._meetings.put, None)

    def send(self, data: Tensor) -> Meeting:
        """Send bytes; they must not change before the meeting is over."""
        made, hear, say, communicator = self._mark(), self._note("recv"), self._note("send"), self._communicator

        def begin() -> Any:
            hear(0)
            made()
            return communicator.send(data, say)

        return self._put(begin)

    def receive(self, data: Tensor) -> Meeting:
        """Receive into memory that only this message uses."""
        free, hear, say, communicator = self._mark(), self._note("recv"), self._note("send"), self._communicator

        def begin() -> Any:
            free()
            say(0)
            return communicator.receive(data, hear(0))

        return self._put(begin)

    def _put(self, begin: Callable[[], Any]) -> Meeting:
        meeting = Meeting(self._communicator, begin)
        self._meetings.put(meeting)
        return meeting

    def _note(self, way: str) -> Callable[[int], int]:
        """Returns a function that exchanges a number with the other end."""
        exchange, process, tag = getattr(self._notes, way), self._process, self._tag

        def call(number: int) -> int:
            note = torch.tensor([number])
            exchange([note], process, tag).wait()
            return int(note)

        return call

    def _mark(self) -> Callable[[], None]:
        """Returns a function that waits for what the calling thread has launched on the device so far."""
        if self._device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event.synchronize


def _run(meetings: queue.SimpleQueue[Meeting | None], device: torch.device) -> None:
    """Hold meetings in order, until None. It has no reference to the line, which ends with its last user."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    # NCCL's kernels wait for the current stream, so make it one on which nothing is computed.
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext():
        while (meeting := meetings.get()) is not None:
            meeting.meet()
            del meeting  # its memory is the worker's
