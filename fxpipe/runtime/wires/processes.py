"""Wires between processes: torch.distributed point to point, over gloo or NCCL.

Processes of one machine share memory (`shared_memory` of CPUs, `peer_memory` of CUDA devices); all else goes through
torch.distributed.
With gloo every edge has its own tag, and receives are posted ahead; messages that wait for their turn
(`fxpipe.plan.urgency`) go through an outbox. Over NCCL, which has no tags, both ends agree before each message
(`nccl_lines`); no message waits for its turn.

A process may have several workers: their messages to each other stay in the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import listed
from fxpipe.plan.mesh import MESH, Mesh
from fxpipe.plan.spec import EdgeSpec
from fxpipe.plan.urgency import URGENT
from fxpipe.runtime.wires.addresses import Channel, Way
from fxpipe.runtime.wires.exchange import barrier
from fxpipe.runtime.wires.group import group_among, peers
from fxpipe.runtime.wires.measured_links import MessageTimes
from fxpipe.runtime.wires.nccl_lines import Communicator, JointLaunch, NcclLine
from fxpipe.runtime.wires.one_process import Loopback, Turns
from fxpipe.runtime.wires.outbox import Outbox, Pieces, Queued, pieces
from fxpipe.runtime.wires.peer_memory import PeerReceiver, PeerSender
from fxpipe.runtime.wires.shared_memory import NONE, Receiver, Sender, connected
from fxpipe.runtime.wires.wired import Receive

Work = Any


class Posted:
    """A send or a receive that has begun; what was received is moved to the device, if one is given.

    `waited` is called with the times from and until which it was waited for.
    """

    here = False  # gloo does not say before `wait`
    waited: Callable[[int, int], None] | None = None

    def __init__(self, work: Work, flat: Tensor, device: torch.device | None = None) -> None:
        self._work, self._flat, self._device = work, flat, device

    def wait(self, what: object = None) -> None:
        """Wait until it has left, or arrived."""
        begin = perf_counter_ns()
        with peers():
            self._work.wait()
        if self.waited is not None:
            self.waited(begin, perf_counter_ns())

    def take(self) -> Tensor:
        """What was received."""
        return self._flat if self._device is None else self._flat.to(self._device)


class ProcessWires:
    """The `Wires` of process `rank` of a run, over gloo (CUDA tensors go through CPU memory) or NCCL.

    The channels are all of the plan, the same list in every process.

    Attributes:
        carriers: what carries messages in each direction of the plan.
        launching: the lock with which this process launches what waits for other devices (see `nccl_lines`).
        times: notes what goes over gloo; None if nothing measures the links.
    """

    shares = True
    """Whether processes of one machine may share memory."""

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
        self.launching = threading.Lock()
        self.times: MessageTimes | None = None
        self._lines: dict[tuple[Channel, int], NcclLine] = {}  # by channel and the process at the other end
        self._outboxes: dict[int, Outbox] = {}
        self._shared = NONE
        directions = _by_direction(channels, mesh)
        if self.shares and device.type in ("cpu", "cuda"):
            ends = (Sender, Receiver) if device.type == "cpu" else (PeerSender, PeerReceiver)
            self._shared = connected(rank, list(directions), device, ends, self.launching)
        if backend == "nccl":
            self._connect({way: own for way, own in directions.items() if self._shared.without.get(way, "not tried")})
        self.carriers = [self._carrier(*way) for way in directions]

    @property
    def name(self) -> str:
        """How messages travel: 'gloo', 'nccl', 'shared memory', 'peer memory', or 'gloo and shared memory'."""
        return self._shared.kinds(self._memory, self.backend)

    @property
    def _memory(self) -> str:
        """The memory through which processes of one machine exchange messages."""
        return "shared memory" if self.device.type == "cpu" else "peer memory"

    @property
    def _unshared(self) -> str:
        """Why no message goes through memory that processes share, where it was not tried."""
        return f"{self.device.type} devices share no memory" if self.shares else "--throttle"

    def isend(self, value: Tensor, way: Way) -> Posted | None:
        rank, tag = self._process_of(way.worker, way.replica), self._tag_of(way)
        if rank == self.rank:
            self._loopback.send(tag, value)
            return None
        flat = value.as_strided((value.numel(),), (1,))
        if rank in self._shared.senders and self._shares(way):
            self._shared.senders[rank].send(tag, flat)
            return None
        flat = flat.cpu() if self.staged else flat
        if self.times is not None:
            self.times.sent(rank, tag, flat.nbytes)
        return Posted(self._begin(flat, rank, way.channel, tag, way.turn), flat)

    def irecv(self, count: int, dtype: torch.dtype, way: Way) -> Receive:
        rank, tag, channel = self._process_of(way.worker, way.replica), self._tag_of(way), way.channel
        if rank == self.rank:
            return self._loopback.expect(tag)
        if rank in self._shared.receivers and self._shares(way):
            return self._shared.receivers[rank].expect(tag, count, dtype)
        flat = torch.empty(count, dtype=dtype, device="cpu" if self.staged or channel is None else self.device)
        target = self.device if self.staged and channel is not None else None
        posted = Posted(self._expect(flat, rank, channel, tag, way.turn), flat, target)
        if self.times is not None:
            posted.waited = self.times.expected(rank, tag)
        return posted

    def close(self) -> None:
        """No more messages through shared memory; called by all processes."""
        shared, self._shared = self._shared, NONE._replace(without=self._shared.without)
        shared.close(barrier)

    def stays(self, edge: EdgeSpec) -> bool:
        return self._mesh.rank_of(edge.src) == self._mesh.rank_of(edge.dst)

    def _begin(self, flat: Tensor, to: int, channel: Channel | None, tag: int, turn: int) -> Work:
        """Begin to send a tensor to another process; without a channel, over gloo."""
        with peers():
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
        with peers():
            if channel is not None and self.backend == "nccl":
                return self._lines[channel, source].receive(flat.view(torch.uint8))
            if not self._waits(turn):
                return dist.irecv(flat, source, tag=tag)
            data = flat.view(torch.uint8)
            return Pieces([dist.irecv(data[place], source, tag=tag) for place in pieces(len(data))])

    def _carrier(self, source: int, target: int) -> Carrier:
        why = self._shared.without.get((source, target), self._unshared)
        if not why:
            return Carrier(source, target, self._memory, "same machine, same user")
        if not self.staged:
            return Carrier(source, target, self.backend, why)
        nccl = "not every process has a CUDA device of its own" if dist.is_nccl_available() else "torch has no NCCL"
        return Carrier(source, target, "gloo through CPU memory", f"{why}; {nccl}")

    def _shares(self, way: Way) -> bool:
        """Whether a message may go through memory that processes share: it is on the device."""
        return self.device.type == "cpu" or way.channel is not None

    def _tag_of(self, way: Way) -> int:
        if way.tag is None:
            assert way.channel is not None
            return self._tags[way.channel]
        return way.tag

    def _waits(self, turn: int) -> bool:
        return turn != URGENT and self.backend == "gloo"

    def _connect(self, directions: Mapping[tuple[int, int], Sequence[Channel]]) -> None:
        """Set up a communicator for each direction between two processes, in one order, since each set-up waits for the
        other end; and in it a line for each channel."""
        for (sender, receiver), own in directions.items():
            self._connect_two(sender, receiver, own)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _connect_two(self, sender: int, receiver: int, channels: Sequence[Channel]) -> None:
        both, probe = sorted((sender, receiver)), torch.zeros(1, dtype=torch.uint8, device=self.device)
        with peers():
            group = group_among(both, "nccl")
            if group is None:
                return
            other = receiver if self.rank == sender else sender
            begin = group.send if self.rank == sender else group.recv
            begin([probe], both.index(other), 0).wait()  # connects the two now, not in the first step
            notes = dist.group.WORLD
        communicator = Communicator(group, both.index(other))
        for channel in channels:
            place = {"above" if self.rank < other else "below": [other]}
            agreement = JointLaunch(self.launching, notes, self._tags[channel], **place)
            self._lines[channel, other] = NcclLine(communicator, agreement, self.device)


def _by_direction(channels: list[Channel], mesh: Mesh) -> dict[tuple[int, int], list[Channel]]:
    """The channels from one process to another, by both; in one global order."""
    directions: dict[tuple[int, int], list[Channel]] = {}
    for channel in channels:
        source, target = (mesh.of_rank(mesh.rank_of(worker)) for worker in channel[1:3])
        if source == target:
            continue
        both = gcd(len(source), len(target))  # replica i exchanges messages with replica j if i ≡ j mod `both`
        for one, other in product(range(len(source)), range(len(target))):
            if one % both == other % both:
                directions.setdefault((source[one], target[other]), []).append(channel)
    return directions


@dataclass(frozen=True)
class Carrier:
    """What carries the messages of a direction between two processes, and why: 'shared memory', 'gloo', or for CUDA
    tensors 'peer memory', 'nccl', 'gloo through CPU memory'."""

    source: int
    target: int
    transport: str
    why: str


def carriers_text(carriers: Iterable[Carrier], most: int = 20) -> list[str]:
    """A line for each transport and reason, naming at most so many pairs: `0 ↔ 1, 2 → 3: gloo: different hosts`."""
    ways: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for each in carriers:
        ways.setdefault((each.transport, each.why), set()).add((each.source, each.target))
    lines = []
    for (transport, why), directions in ways.items():
        both = {(one, other) for one, other in directions if (other, one) in directions}
        named = sorted((min(way), max(way), "↔") for way in both if way[0] < way[1])
        named += sorted((*way, "→") for way in directions - both)
        pairs = "all pairs" if len(ways) == 1 else listed([f"{one} {sign} {other}" for one, other, sign in named], most)
        lines.append(f"{pairs}: {transport}: {why}")
    return lines
