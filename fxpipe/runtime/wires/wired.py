"""A worker's messages over wires: between processes, or between workers of one.

Both ends know every message beforehand, so only values are sent, and receives are posted ahead. A worker waits for a
send only when, by the schedule, the receiver must have taken it, so the wait takes no time.

Sends and receives name workers; the wires know in which process a worker is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.observe.watch import Cause
from fxpipe.plan.packing import Layout
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import EdgeSpec
from fxpipe.plan.urgency import turn_of
from fxpipe.runtime.wires.addresses import NOTES, Addresses, Channel, ReplicaSeat, Way, evaluation_edges
from fxpipe.runtime.wires.transport import Note, Transport
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.check import unread, unreceived

Waiting = tuple[int, Cause]
"""The worker that waits, and what for."""


class Leaving(Protocol):
    """A send that has begun."""

    def wait(self) -> None:
        """Wait until it has left."""


class Receive(Protocol):
    """A receive that was posted."""

    @property
    def here(self) -> bool:
        """Whether it is known to have arrived."""

    def wait(self, what: Waiting) -> None:
        """Wait until it has arrived.

        Raises:
            RunError: no worker will send it.
            PeerLost: the process that sends it is gone.
        """

    def take(self) -> Tensor:
        """The tensor, in its shape or flat: on the device; numbers on the CPU."""


class Wires(Protocol):
    """Point-to-point sends and receives of tensors between workers, in one or several processes.

    Attributes:
        rank: of this process in the run.
        ordered: all messages of a channel share one line, and keep its order.
        staged: messages go through CPU memory, though the workers compute on another device.
    """

    rank: int
    device: torch.device
    ordered: bool
    staged: bool

    def isend(self, value: Tensor, way: Way) -> Leaving | None:
        """Begin to send to a worker; the caller keeps the result until it has waited for it.

        Args:
            value: dense; it must not change afterwards.

        Returns:
            None if there is nothing to wait for: the worker is in this process.
        """

    def irecv(self, count: int, dtype: torch.dtype, way: Way) -> Receive:
        """Begin to receive from a worker, into new memory, a message that is sent with the same turn."""

    def stays(self, edge: EdgeSpec) -> bool:
        """Whether both ends of an edge are in one process."""


class WiredTransport(Transport):
    """One worker's messages over wires: either of training or of evaluation.

    Args:
        edges: the edges whose values it carries.
        microbatches: how many a minibatch has; 1 for evaluation, which counts every batch as a minibatch.
        in_flight: how many microbatches may be in flight. When a worker ends an action of microbatch q, all messages of
            microbatch q − in_flight have been received.
        seat: the replica of the worker; None if there is one.
        weights_in_flight: as `in_flight`, for weight copies.
    """

    def __init__(
        self,
        worker: int,
        wires: Wires,
        addresses: Addresses,
        edges: Sequence[EdgeSpec],
        microbatches: int,
        in_flight: int,
        seat: ReplicaSeat | None = None,
        weights_in_flight: int = 0,
    ) -> None:
        self.worker = worker
        self._seat = seat or ReplicaSeat(worker)
        self.wires = wires
        self.addresses = addresses
        self._microbatches = microbatches
        self._in_flight = in_flight
        self._routes: dict[str, _Route] = {}
        self._carry(edges)
        self._order: dict[str, deque[str]] = {}  # by edge; edges of one channel and shape share it
        self._posted: dict[tuple[Any, ...], Receive] = {}
        self._sent: deque[_Sent] = deque()
        self._sent_weights: deque[_Sent] = deque()
        self._weights_in_flight = weights_in_flight
        self._now = 0

    @staticmethod
    def of_training(
        plan: Plan, worker: int, wires: Wires, addresses: Addresses, schedule: Schedule, replica: int = 0
    ) -> WiredTransport:
        """The transport of a worker's messages of training.

        Args:
            schedule: of one replica.
        """
        own, seat = schedule.microbatches, ReplicaSeat(worker, replica, plan.replicas)
        most, weights = unreceived(schedule), unread(schedule)
        transport = WiredTransport(worker, wires, addresses, plan.all_edges, own, most, seat, weights)
        transport.set_order(*(of_shape.edges for of_shape in plan.of_shapes))
        return transport

    def of_evaluations(self, plan: Plan, ahead: int) -> WiredTransport:
        """A transport over the same wires for evaluations: they must not wait until messages of training are received.

        Args:
            ahead: how many batches a worker may be ahead of the next one.
        """
        seat = ReplicaSeat(self.worker, self._seat.replica, () if plan.crossing else plan.replicas)
        edges = evaluation_edges(plan)
        transport = WiredTransport(self.worker, self.wires, self.addresses, edges, 1, ahead, seat)
        transport.set_order(*(step.edges for step in plan.evaluations))
        return transport

    def set_order(self, *shapes: Sequence[EdgeSpec]) -> None:
        """From now on this worker sends the values of each shape's edges in this order, in every microbatch."""
        self._order = {}
        for edges in shapes:
            self._keep_order(edges)

    def add(self, edges: Sequence[EdgeSpec]) -> None:
        between = [edge for edge in edges if not self.wires.stays(edge)]
        if self.wires.ordered and (found := self.addresses.unconnected(between)):
            raise RunError(
                f"worker {found[0].src} has no connection to worker {found[0].dst} for {found[0].name}",
                hint="NCCL connects workers when a run begins: compile with a batch of this shape (--scan N)",
            )
        self.addresses.add(edges)
        self._carry(edges)
        self._keep_order(edges)

    def _carry(self, edges: Sequence[EdgeSpec]) -> None:
        for edge in edges:
            if self.worker in (edge.src, edge.dst):
                turn = turn_of(edge.kind, edge.sent.bytes)
                channel, tag = self.addresses.channel(edge), self.addresses.tag(edge)
                self._routes[edge.name] = _Route(Layout(edge.sent, edge.name), channel, tag, turn)

    def _keep_order(self, edges: Sequence[EdgeSpec]) -> None:
        """Make sends of the edges of one shape keep their order."""
        of_channel: dict[Channel, deque[str]] = {}
        for edge in edges if self.wires.ordered else ():
            if edge.src == self.worker:
                order = of_channel.setdefault(self.addresses.channel(edge), deque())
                order.append(edge.name)
                self._order[edge.name] = order

    def expect(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> None:
        layout, channel, tag, turn = self._routes[edge.name]
        source = self._seat.peer(edge.src, microbatch)
        pending = self.wires.irecv(layout.count, layout.dtype, Way(edge.src, channel, tag, turn, source))
        self._posted[edge.name, minibatch, microbatch] = pending

    def send(self, edge: EdgeSpec, minibatch: int, microbatch: int, value: Tensor) -> None:
        if order := self._order.get(edge.name):
            if order[0] != edge.name:
                raise RunError(
                    f"worker {self.worker} sends {edge.name} where {order[0]} comes next",
                    hint="over NCCL, an edited stage must keep the order of its sends",
                )
            order.rotate(-1)
        layout, channel, tag, turn = self._routes[edge.name]
        reader = self._seat.peer(edge.dst, microbatch)
        self._keep(self.wires.isend(layout(value), Way(edge.dst, channel, tag, turn, reader)), edge.dst)

    def recv(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> Tensor:
        layout = self._routes[edge.name].layout
        value = self._wait((edge.name, minibatch, microbatch), Cause(edge.kind, edge.name, edge.src))
        return value if value.shape == layout.shape else value.as_strided(layout.shape, layout.stride)

    def expect_weights(self, owner: int, version: int, ahead: int, size: int) -> None:
        turn = self.addresses.turn_of_weights(owner, self.worker)
        channel, source = ("weights", owner, self.worker), self._seat.sender(owner)
        pending = self.wires.irecv(size, torch.uint8, Way(owner, channel, turn=turn, replica=source))
        self._posted["weights", owner, version, ahead] = pending

    def send_weights(self, reader: int, version: int, ahead: int, block: Tensor) -> None:
        turn = self.addresses.turn_of_weights(self.worker, reader)
        for replica in self._seat.receivers(reader):
            channel = ("weights", self.worker, reader)
            pending = self.wires.isend(block, Way(reader, channel, turn=turn, replica=replica))
            if pending is not None:
                self._sent_weights.append(_Sent(self._now, pending, reader))

    def recv_weights(self, owner: int, version: int, ahead: int) -> Tensor:
        return self._wait(("weights", owner, version, ahead), Cause("weights", "weights", owner))

    def drop_weights(self) -> None:
        for key in [key for key in self._posted if key[0] == "weights"]:
            self._wait(key, Cause("weights", "weights", key[1]))

    def expect_note(self, source: int, what: Note, count: int) -> None:
        tag = self.addresses.tag_of_note(what[0], source, self.worker)
        sender = self._seat.sender(source)
        pending = self.wires.irecv(count, torch.float64, Way(source, None, tag, replica=sender))
        self._posted["note", source, what] = pending

    def send_note(self, to: int, what: Note, numbers: Tensor) -> None:
        tag = self.addresses.tag_of_note(what[0], self.worker, to)
        for replica in self._seat.receivers(to):
            self._keep(self.wires.isend(numbers, Way(to, None, tag, replica=replica)), to)

    def recv_note(self, source: int, what: Note) -> Tensor:
        return self._wait(("note", source, what), Cause(*NOTES[what[0]], source))

    def done(self, phase: str, minibatch: int, microbatch: int) -> None:
        if phase == "F":
            self._now = minibatch * self._microbatches + microbatch + 1
            self._reap(self._sent, self._now - self._in_flight)
            self._reap(self._sent_weights, self._now - self._weights_in_flight)

    def begin(self, minibatch: int) -> None:
        self._now = minibatch * self._microbatches

    def finish(self) -> None:
        self._reap(self._sent, self._now + 1)
        self._reap(self._sent_weights, self._now + 1)
        self._now = 0

    def _wait(self, key: tuple[Any, ...], cause: Cause) -> Tensor:
        """Receive the message of a key: on the device; numbers on the CPU.

        Raises:
            RunError: workers of this process wait for each other.
        """
        coming = self._posted.pop(key)
        if not coming.here:
            self.watch.open("wait", cause)
            coming.wait((self.worker, cause))
            self.watch.close()
        return coming.take()

    def _reap(self, sent: deque[_Sent], before: int) -> None:
        while sent and sent[0].at < before:
            _, pending, to = sent.popleft()
            self.watch.sends = Cause("sent", "sent", to)
            pending.wait()
        self.watch.sends = None

    def _keep(self, pending: Leaving | None, to: int) -> None:
        if pending is not None:
            self._sent.append(_Sent(self._now, pending, to))


class _Route(NamedTuple):
    """How the values of an edge travel."""

    layout: Layout
    channel: Channel
    tag: int
    turn: int


class _Sent(NamedTuple):
    """A send that may not have been received yet: its microbatch, and its receiver."""

    at: int
    pending: Leaving
    to: int
