"""Messages over NCCL that begin once both ends are ready, so that nothing on a device waits for another process.

A send and a receive of NCCL are kernels: each runs until the other one has run, too, but for a few small messages.
Whatever waits for the whole device waits for them: the loading of a kernel, an allocation, `torch.cuda.synchronize` in
a user's callback. A worker that has put one on its device before the other end comes stops there, and the other end may
wait for just this worker. So the ends meet first, by notes over gloo:

    receiver: its memory is free   ─ ready →
                                   ← go ─      sender: its value is made
    receive                                    send

A thread a line does that, while the worker computes.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

Exchange = Callable[[], Any]


class Meeting:
    """A message that begins when both ends are ready."""

    def __init__(self, begin: Exchange) -> None:
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
            Exception: what went wrong; of torch.distributed's or gloo's if the other end is gone.
        """
        self._work.result().wait()


class NcclLine:
    """One end of a channel between two processes, whose messages keep their order.

    Args:
        group: of the two, over NCCL.
        place: of the other one in it.
        notes: the group of all processes, over gloo.
        process: the other one in that.
        tag: of the notes; nothing else has this tag.
    """

    def __init__(self, group: Any, place: int, notes: Any, process: int, tag: int, device: torch.device) -> None:
        self._group, self._place = group, place
        self._notes, self._process, self._tag = notes, process, tag
        self._device = device
        self._meetings: queue.SimpleQueue[Meeting | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._meetings, device), name="fxpipe line", daemon=True).start()
        weakref.finalize(self, self._meetings.put, None)

    def send(self, data: Tensor) -> Meeting:
        """Send bytes; they must not change before the meeting is over."""
        message = partial(self._group.send, [data], self._place, 0)
        return self._put(message, self._note("recv"), self._mark(), self._note("send"))

    def receive(self, data: Tensor) -> Meeting:
        """Receive into memory that is this message's alone."""
        message = partial(self._group.recv, [data], self._place, 0)
        return self._put(message, self._mark(), self._note("send"), self._note("recv"))

    def _put(self, message: Exchange, *before: Exchange) -> Meeting:
        def begin() -> Any:
            for step in before:
                step()
            return message()

        meeting = Meeting(begin)
        self._meetings.put(meeting)
        return meeting

    def _note(self, way: str) -> Callable[[], None]:
        exchange, process, tag = getattr(self._notes, way), self._process, self._tag
        return lambda: exchange([torch.zeros(1, dtype=torch.uint8)], process, tag).wait()

    def _mark(self) -> Callable[[], None]:
        """Waits until the device has done what the calling thread has asked of it so far."""
        if self._device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event.synchronize


def _run(meetings: queue.SimpleQueue[Meeting | None], device: torch.device) -> None:
    """Hold meetings, one after the other, until there is None. It knows no line, which ends with its last user."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    # NCCL's kernels wait for the current stream: for one on which nothing is computed.
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext():
        while (meeting := meetings.get()) is not None:
            meeting.meet()
            del meeting  # its memory is the worker's
