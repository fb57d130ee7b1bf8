"""Wires between processes: torch.distributed point to point, over gloo or NCCL.

With gloo every edge has its own tag, and receives are posted ahead; messages that wait for their turn
(`fxpipe.plan.urgency`) go through an outbox. NCCL has no tags: each channel (a pair of workers, a kind, a phase at each
end) has its own communicator, in which both ends keep the plan's order (`NcclLine`); no message waits for its turn.

A process may have several workers: their messages to each other stay in the process.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.plan.spec import MESH, EdgeSpec, Mesh
from fxpipe.plan.urgency import URGENT
from fxpipe.runtime.wires.addresses import Channel, Way
from fxpipe.runtime.wires.group import group_among, peers
from fxpipe.runtime.wires.one_process import Loopback, Turns
from fxpipe.runtime.wires.outbox import Outbox, Pieces, Queued, pieces
from fxpipe.runtime.wires.wired import Receive

Work = Any


class Posted:
    """A send or a receive that has begun.

    Args:
        device: the device that a received tensor must be moved to; None if it is there.
    """

    here = False  # gloo does not say before `wait`

    def __init__(self, work: Work, flat: Tensor, rank: int, device: torch.device | None = None) -> None:
        self._work, self._flat, self._rank, self._device = work, flat, rank, device

    def wait(self, what: object = None) -> None:
        """Wait until it has left, or arrived."""
        with peers(self._rank):
            self._work.wait()

    def take(self) -> Tensor:
        """What was received."""
        return self._flat if self._device is None else self._flat.to(self._device)


class ProcessWires:
    """The `Wires` of one process, over gloo or NCCL.

    Args:
        rank: of this process among all of a run.
        backend: `gloo` (the default group; CUDA tensors go through CPU memory) or `nccl`.
        channels: all channels of the plan, the same list in every process.
        mesh: where workers and replicas are.
        turns: of the rows in this process; None if there is one row.
    """

    def __init__(
        self,
        rank: int,
        backend: str,
        channels: list[Channel],
        device: torch.device,
        mesh: Mesh = MESH,
        turns: Turns | None = None,
    ) -> None:
        self.rank = rank
        self._mesh, self._process_of = mesh, cache(mesh.process_of)
        self._loopback = Loopback(turns)
        self.backend = backend
        self.device = device
        self.ordered = backend == "nccl"
        self.staged = backend == "gloo" and device.type != "cpu"
        self._tags = {channel: 1 + i for i, channel in enumerate(channels)}
        self._lines: dict[tuple[Channel, int], NcclLine] = {}  # by channel and the process at the other end
        self._outboxes: dict[int, Outbox] = {}
        if backend == "nccl":
            self._connect(channels)

    def isend(self, value: Tensor, way: Way) -> Posted | None:
        rank, tag = self._process_of(way.worker, way.replica), self._tag_of(way)
        if rank == self.rank:
            self._loopback.send(tag, value)
            return None
        flat = value.as_strided((value.numel(),), (1,))
        flat = flat.cpu() if self.staged else flat
        return Posted(self._begin(flat, rank, way.channel, tag, way.turn), flat, self.rank)

    def irecv(self, count: int, dtype: torch.dtype, way: Way) -> Receive:
        rank, tag, channel = self._process_of(way.worker, way.replica), self._tag_of(way), way.channel
        if rank == self.rank:
            return self._loopback.expect(tag)
        flat = torch.empty(count, dtype=dtype, device="cpu" if self.staged or channel is None else self.device)
        target = self.device if self.staged and channel is not None else None
        return Posted(self._expect(flat, rank, channel, tag, way.turn), flat, self.rank, target)

    def stays(self, edge: EdgeSpec) -> bool:
        return self._mesh.rank_of(edge.src) == self._mesh.rank_of(edge.dst)

    def _begin(self, flat: Tensor, to: int, channel: Channel | None, tag: int, turn: int) -> Work:
        """Begin to send a tensor to another process; without a channel, over gloo."""
        with peers(self.rank):
            if channel is not None and self.backend == "nccl":
                return self._lines[channel, to].send(flat.view(torch.uint8))  # NCCL does not support all dtypes
            if not self._waits(turn):
                return dist.isend(flat, to, tag=tag)
            group = dist.group.WORLD  # not looked up later: `peers` changes it in this thread
        assert group is not None
        message = Queued(turn, flat.view(torch.uint8), lambda data: group.send([data], to, tag))
        self._outboxes.setdefault(to, Outbox()).put(channel, message)
        return message

    def _expect(self, flat: Tensor, source: int, channel: Channel | None, tag: int, turn: int) -> Work:
        """Begin to receive what another process sends with `_begin`."""
        with peers(self.rank):
            if channel is not None and self.backend == "nccl":
                return self._lines[channel, source].receive(flat.view(torch.uint8))
            if not self._waits(turn):
                return dist.irecv(flat, source, tag=tag)
            data = flat.view(torch.uint8)
            return Pieces([dist.irecv(data[place], source, tag=tag) for place in pieces(len(data))])

    def _tag_of(self, way: Way) -> int:
        if way.tag is None:
            assert way.channel is not None
            return self._tags[way.channel]
        return way.tag

    def _waits(self, turn: int) -> bool:
        return turn != URGENT and self.backend == "gloo"

    def _connect(self, channels: list[Channel]) -> None:
        """Set up a communicator for each channel between ranks, in one global order, since each set-up waits for the
        other end."""
        for channel in channels:
            source, target = (self._mesh.of_rank(self._mesh.rank_of(worker)) for worker in channel[1:3])
            if source == target:
                continue
            both = gcd(len(source), len(target))  # replica i exchanges messages with replica j if i ≡ j mod `both`
            for one, other in product(range(len(source)), range(len(target))):
                if one % both == other % both:
                    self._connect_two(channel, source[one], target[other])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _connect_two(self, channel: Channel, source: int, target: int) -> None:
        both, probe = sorted((source, target)), torch.zeros(1, device=self.device)
        with peers(self.rank):
            group = group_among(both, "nccl")
            if group is None:
                return
            if self.rank == source:
                dist.send(probe, target, group=group)
            else:
                dist.recv(probe, source, group=group)
            other = target if self.rank == source else source
            notes, tag = dist.group.WORLD, self._tags[channel]
        self._lines[channel, other] = NcclLine(group, both.index(other), notes, other, tag, self.device)


class Meeting:
    """A message that begins when both ends are ready."""

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
    """One end of a channel between two processes, whose messages keep their order, and begin once both ends are ready.

    NCCL's sends and receives are kernels: except for a few small messages, each runs until the other one has run, too.
    Everything that waits for the whole device waits for them: loading a kernel, an allocation, `torch.cuda.synchronize`
    in a user's callback. A worker that launches one before the other end is ready may block there while the other end
    waits for this worker. So the ends first exchange notes over gloo:

        receiver: its memory is free   ─ ready →
                                       ← go ─      sender: its value is made
        receive                                    send

    A thread for each line does this while the worker computes.

    Args:
        group: of the two processes, over NCCL.
        place: the rank of the other process in it.
        notes: the group of all processes, over gloo.
        process: the rank of the other process in that.
        tag: of the notes, which nothing else has.
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
        """Receive into memory that only this message uses."""
        message = partial(self._group.recv, [data], self._place, 0)
        return self._put(message, self._mark(), self._note("send"), self._note("recv"))

    def _put(self, message: Callable[[], Any], *before: Callable[[], Any]) -> Meeting:
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
