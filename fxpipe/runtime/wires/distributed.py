"""Messages between processes: torch.distributed point to point, over gloo or NCCL.

Both ends know every message beforehand, so nothing but values travels. With gloo every edge has its own tag, and
receives are posted ahead. NCCL has no tags, so there every channel (a pair of workers, a kind, a phase at each end) has
a communicator of its own, in which both ends keep the plan's order (`fxpipe.runtime.wires.rendezvous`).

A worker waits for its sends only once the schedule says that the receiver has taken them, so that the wait takes no
time: gloo's `is_completed` says nothing before `wait`.

Over gloo, what waits its turn (`fxpipe.plan.urgency`) goes through an outbox; over NCCL all goes at once.

A process may have several workers. Whoever sends and receives names workers; where a worker is, the wires know. What
workers of one process send each other stays there (`mailbox`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.observe.watch import Cause
from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import MESH, EdgeSpec, Mesh, Plan
from fxpipe.plan.urgency import URGENT, turn_of
from fxpipe.runtime.wires.addresses import BATCH, CALL, LOSS, Addresses, Channel, ReplicaSeat
from fxpipe.runtime.wires.group import group_among, peers
from fxpipe.runtime.wires.mailbox import Loopback, Passing
from fxpipe.runtime.wires.outbox import Coming, Leaving, Outbox, pieces
from fxpipe.runtime.wires.rendezvous import NcclLine
from fxpipe.runtime.wires.transport import Note, Transport
from fxpipe.runtime.wires.turns import Turns
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.check import unreceived
from fxpipe.task.callbacks import CALLBACKS

Work = Any
Pending = tuple[Work, Tensor]
"""A send or a receive that has begun, and its tensor; of a receive within the process, one that is never read."""

_NOTHING = torch.empty(0)


class Wires:
    """Point-to-point sends and receives of flat tensors, on whatever backend there is.

    Args:
        rank: of this process among all of a run.
        backend: `gloo` (the default group; CUDA tensors go through CPU memory) or `nccl`.
        channels: all channels of the plan, the same list in every process.
        mesh: where workers and replicas are.
    """

    def __init__(
        self,
        rank: int,
        backend: str,
        channels: list[Channel],
        device: torch.device,
        mesh: Mesh = MESH,
    ) -> None:
        self.rank = rank
        self._mesh = mesh
        self._loopback = Loopback()
        self.turns = Turns()
        self.backend = backend
        self.device = device
        self.ordered = backend == "nccl"
        self.staged = backend == "gloo" and device.type != "cpu"
        self._tags = {channel: 1 + i for i, channel in enumerate(channels)}
        self._lines: dict[tuple[Channel, int], NcclLine] = {}  # by the process at the other end, too
        self._outboxes: dict[int, Outbox] = {}
        if backend == "nccl":
            self._connect(channels)

    def isend(
        self,
        flat: Tensor,
        to: int,
        channel: Channel | None,
        tag: int | None = None,
        turn: int = URGENT,
        replica: int = 0,
    ) -> Pending | None:
        """Begin to send to a worker; the caller keeps the pair until it has waited for the work.

        Args:
            channel: None for a few numbers that are on the CPU, and have a tag: over gloo, with any backend.
            turn: the same for all messages of a tag.
            replica: which one of the worker.

        Returns:
            None if there is nothing to wait for: the worker is in this process.
        """
        rank, tag = self._process_of(to, replica), self._tag_of(channel, tag)
        if rank == self.rank:
            self._loopback.send(tag, flat)
            return None
        flat = flat.cpu() if self.staged else flat
        return self._begin(flat, rank, channel, tag, turn), flat

    def irecv(
        self,
        count: int,
        dtype: torch.dtype,
        source: int,
        channel: Channel | None,
        tag: int | None = None,
        turn: int = URGENT,
        replica: int = 0,
    ) -> Pending:
        """Begin to receive from a replica of a worker, into new memory, what is sent with the same turn."""
        rank, tag = self._process_of(source, replica), self._tag_of(channel, tag)
        if rank == self.rank:
            return self._loopback.expect(tag), _NOTHING
        flat = torch.empty(count, dtype=dtype, device="cpu" if self.staged or channel is None else self.device)
        return self._expect(flat, rank, channel, tag, turn), flat

    def stays(self, edge: EdgeSpec) -> bool:
        """Whether both ends of an edge are in one process."""
        return self._rank_of(edge.src) == self._rank_of(edge.dst)

    def passing(self, pending: Pending) -> Passing | None:
        """A receive of what another worker of this process sends: it has come, or never will. None for any other."""
        return pending[0] if isinstance(pending[0], Passing) else None

    def received(self, pending: Pending, numbers: bool = False) -> Tensor:
        """The tensor of a finished receive, on the device; numbers, which have no channel, on the CPU."""
        return pending[1].to(self.device) if self.staged and not numbers else pending[1]

    def finished(self, pending: Pending | None) -> None:
        """Wait until a send has left, or a receive has come."""
        if pending is None:
            return
        with peers(self.rank):
            pending[0].wait()

    def _begin(self, flat: Tensor, to: int, channel: Channel | None, tag: int, turn: int) -> Work:
        """Begin to send another process a tensor; over gloo, if it has no channel."""
        with peers(self.rank):
            if channel is not None and self.backend == "nccl":
                return self._lines[channel, to].send(flat.view(torch.uint8))  # NCCL does not know all types
            if not self._waits(turn):
                return dist.isend(flat, to, tag=tag)
            group = dist.group.WORLD  # not looked up later: `peers` changes it in this thread
        assert group is not None
        message = Leaving(turn, flat.view(torch.uint8), lambda data: group.send([data], to, tag))
        self._outboxes.setdefault(to, Outbox()).put(channel, message)
        return message

    def _expect(self, flat: Tensor, source: int, channel: Channel | None, tag: int, turn: int) -> Work:
        """Begin to receive what another process sends by `_begin`."""
        with peers(self.rank):
            if channel is not None and self.backend == "nccl":
                return self._lines[channel, source].receive(flat.view(torch.uint8))
            if not self._waits(turn):
                return dist.irecv(flat, source, tag=tag)
            data = flat.view(torch.uint8)
            return Coming([dist.irecv(data[place], source, tag=tag) for place in pieces(len(data))])

    def _tag_of(self, channel: Channel | None, tag: int | None) -> int:
        if tag is None:
            assert channel is not None
            return self._tags[channel]
        return tag

    def _waits(self, turn: int) -> bool:
        return turn != URGENT and self.backend == "gloo"

    def _rank_of(self, worker: int) -> int:
        return self._mesh.placement[worker] if self._mesh.placement else worker

    def _process_of(self, worker: int, replica: int) -> int:
        return self._mesh.of_rank(self._rank_of(worker))[replica]

    def _connect(self, channels: list[Channel]) -> None:
        """Set up a communicator for each channel between ranks, in one global order: each set-up waits for the other
        end."""
        for channel in channels:
            source, target = (self._mesh.of_rank(self._rank_of(worker)) for worker in channel[1:3])
            if source == target:
                continue
            both = gcd(len(source), len(target))  # a replica exchanges messages with every so-manieth one
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


class DistTransport(Transport):
    """One worker's end of the wires, for the messages of training or for those of evaluation.

    Args:
        edges: the edges whose values it carries.
        microbatches: how many a minibatch has; 1 for evaluation, which counts every batch as a minibatch.
        in_flight: how many microbatches may be in flight. When a worker ends an action of microbatch q, everything of
            microbatch q − in_flight has been received everywhere.
        seat: which replica of the worker it is of; None where there is one.
    """

    def __init__(
        self,
        plan: Plan,
        worker: int,
        wires: Wires,
        addresses: Addresses,
        edges: Sequence[EdgeSpec],
        microbatches: int,
        in_flight: int,
        seat: ReplicaSeat | None = None,
    ) -> None:
        self.worker = worker
        self._seat = seat or ReplicaSeat(worker)
        self.wires = wires
        self.addresses = addresses
        self._microbatches = microbatches
        self._in_flight = in_flight
        self._layouts: dict[str, Layout] = {}
        self._carry(edges)
        self._order: dict[str, deque[str]] = {}  # by edge; those of one channel and shape share theirs
        self._posted: dict[tuple[Any, ...], Pending] = {}
        self._sent: deque[_Sent] = deque()
        self._sent_weights: deque[_Sent] = deque()
        self._slack = in_flight + plan.workers * microbatches  # no reader's lag reaches further
        self._now = 0
        self._loss_channel = ("loss", plan.loss_worker, 0)
        self._loss_worker = plan.loss_worker
        self._loss_count = 1 + len(plan.metrics)

    @staticmethod
    def of_training(
        plan: Plan, worker: int, wires: Wires, addresses: Addresses, schedule: Schedule, replica: int = 0
    ) -> DistTransport:
        """The transport of a worker's messages of training.

        Args:
            schedule: of the worker's replicas.
        """
        own, seat = schedule.microbatches, ReplicaSeat(worker, replica, plan.replicas)
        transport = DistTransport(plan, worker, wires, addresses, plan.all_edges, own, unreceived(schedule), seat)
        transport.set_order(*(of_shape.edges for of_shape in plan.of_shapes))
        return transport

    def set_order(self, *shapes: Sequence[EdgeSpec]) -> None:
        """From now on this worker sends the values of the edges of each shape in their order, again and again."""
        self._order = {}
        for edges in shapes:
            self._keep_order(edges)

    def add(self, edges: Sequence[EdgeSpec]) -> None:
        between = [edge for edge in edges if not self.wires.stays(edge)]
        if self.wires.ordered and (found := self.addresses.unconnected(between)):
            raise RunError(
                f"worker {found[0].src} has no line to worker {found[0].dst} for {found[0].name}",
                hint="NCCL's lines are set up when a run begins: compile with a batch of this shape (--scan N)",
            )
        self.addresses.add(edges)
        self._carry(edges)
        self._keep_order(edges)

    def _carry(self, edges: Sequence[EdgeSpec]) -> None:
        self._layouts |= {e.name: Layout(e.sent, e.name) for e in edges if self.worker in (e.src, e.dst)}

    def _keep_order(self, edges: Sequence[EdgeSpec]) -> None:
        """The edges of one shape stay in their order."""
        of_channel: dict[Channel, deque[str]] = {}
        for edge in edges if self.wires.ordered else ():
            if edge.src == self.worker:
                order = of_channel.setdefault(self.addresses.channel(edge), deque())
                order.append(edge.name)
                self._order[edge.name] = order

    def expect(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> None:
        layout = self._layouts[edge.name]
        channel = self.addresses.channel(edge)
        turn = turn_of(edge.kind, edge.sent.bytes)
        tag, source = self.addresses.tag(edge), self._seat.peer(edge.src, microbatch)
        pending = self.wires.irecv(layout.count, layout.dtype, edge.src, channel, tag, turn, source)
        self._posted[edge.name, minibatch, microbatch] = pending

    def send(self, edge: EdgeSpec, minibatch: int, microbatch: int, value: Tensor) -> None:
        channel = self.addresses.channel(edge)
        if order := self._order.get(edge.name):
            if order[0] != edge.name:
                raise RunError(
                    f"worker {self.worker} sends {edge.name} when {order[0]} is due",
                    hint="over NCCL, an edited file must keep the order of its sends",
                )
            order.rotate(-1)
        layout = self._layouts[edge.name]
        flat = layout.flat(layout(value))
        turn = turn_of(edge.kind, edge.sent.bytes)
        tag, reader = self.addresses.tag(edge), self._seat.peer(edge.dst, microbatch)
        self._keep(self.wires.isend(flat, edge.dst, channel, tag, turn, reader), edge.dst)

    def recv(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> Tensor:
        layout = self._layouts[edge.name]
        flat = self._wait((edge.name, minibatch, microbatch), Cause(edge.kind, edge.name, edge.src))
        return flat.as_strided(layout.shape, layout.stride)

    def expect_weights(self, owner: int, version: int, ahead: int, size: int) -> None:
        turn = self.addresses.turn_of_weights(owner, self.worker)
        channel, source = ("weights", owner, self.worker), self._seat.teller(owner)
        pending = self.wires.irecv(size, torch.uint8, owner, channel, turn=turn, replica=source)
        self._posted["weights", owner, version, ahead] = pending

    def send_weights(self, reader: int, version: int, ahead: int, block: Tensor) -> None:
        turn = self.addresses.turn_of_weights(self.worker, reader)
        for replica in self._seat.told(reader):
            channel = ("weights", self.worker, reader)
            pending = self.wires.isend(block, reader, channel, turn=turn, replica=replica)
            if pending is not None:
                self._sent_weights.append(_Sent(self._now, pending, reader))

    def recv_weights(self, owner: int, version: int, ahead: int) -> Tensor:
        return self._wait(("weights", owner, version, ahead), Cause("weights", "weights", owner))

    def drop_weights(self) -> None:
        """Receive the blocks of weights that were announced, and that nothing will ask for."""
        for key in [key for key in self._posted if key[0] == "weights"]:
            self._wait(key, Cause("weights", "weights", key[1]))

    def expect_note(self, source: int, what: Note, count: int) -> None:
        tag = self.addresses.tag_of_note(what[0], source, self.worker)
        teller = self._seat.teller(source)
        pending = self.wires.irecv(count, torch.float64, source, None, tag, replica=teller)
        self._posted["note", source, what] = pending

    def send_note(self, to: int, what: Note, numbers: Tensor) -> None:
        tag = self.addresses.tag_of_note(what[0], self.worker, to)
        for replica in self._seat.told(to):
            self._keep(self.wires.isend(numbers, to, None, tag, replica=replica), to)

    def recv_note(self, source: int, what: Note) -> Tensor:
        return self._wait(("note", source, what), _cause(what[0], source), numbers=True)

    def expect_loss(self, minibatch: int) -> None:
        """On worker 0, if it is not the loss worker: the loss of `minibatch` will be received soon."""
        source, teller = self._loss_worker, self._seat.teller(self._loss_worker)
        pending = self.wires.irecv(self._loss_count, torch.float32, source, self._loss_channel, replica=teller)
        self._posted["loss", minibatch] = pending

    def send_loss(self, loss: Tensor) -> None:
        """Report a minibatch's loss, with its metrics after it (float32), to worker 0."""
        for replica in self._seat.told(0):
            self._keep(self.wires.isend(loss.reshape(-1), 0, self._loss_channel, replica=replica), 0)

    def recv_loss(self, minibatch: int) -> Tensor:
        """On worker 0: wait for a minibatch's loss, with its metrics after it."""
        return self._wait(("loss", minibatch), Cause("loss", "loss", self._loss_worker))

    def done(self, phase: str, minibatch: int, microbatch: int) -> None:
        if phase == "F":
            self._now = minibatch * self._microbatches + microbatch + 1
            self._reap(self._sent, self._now - self._in_flight)
            self._reap(self._sent_weights, self._now - self._slack)

    def begin(self, minibatch: int) -> None:
        """The first minibatch of this worker is this one."""
        self._now = minibatch * self._microbatches

    def finish(self) -> None:
        self._reap(self._sent, self._now + 1)
        self._reap(self._sent_weights, self._now + 1)
        self._now = 0

    def _wait(self, key: tuple[Any, ...], cause: Cause, numbers: bool = False) -> Tensor:
        """What was received under a key: on the device, but for numbers.

        Raises:
            RunError: workers of this process wait for each other.
        """
        pending = self._posted.pop(key)
        if (passing := self.wires.passing(pending)) is not None:
            if not passing.arrived():
                self.watch.open("wait", cause)
                self.wires.turns.wait(passing.arrived, _waiting(self.worker, cause))
                self.watch.close()
            return passing.take()
        self.watch.open("wait", cause)
        self.wires.finished(pending)
        self.watch.close()
        return self.wires.received(pending, numbers)

    def _reap(self, sent: deque[_Sent], before: int) -> None:
        while sent and sent[0].at < before:
            _, pending, to = sent.popleft()
            self.watch.sends = Cause("sent", "sent", to)
            self.wires.finished(pending)
        self.watch.sends = None

    def _keep(self, pending: Pending | None, to: int) -> None:
        if pending is not None:
            self._sent.append(_Sent(self._now, pending, to))


def _waiting(worker: int, cause: Cause) -> str:
    return f"worker {worker} waits for {cause.name} of worker {cause.worker}"


def _cause(note: str, source: int) -> Cause:
    """What a worker waits for that waits for a note."""
    if note == LOSS:
        return Cause("loss", "loss", source)
    if note in ("overflow", "skip"):
        return Cause("overflow", f"note {note}", source)
    return Cause("token", note, source) if note in (BATCH, CALL, *CALLBACKS) else Cause("norm", f"norm {note}", source)


class _Sent(NamedTuple):
    """A send that may not have been received: after so many microbatches, and to whom."""

    at: int
    pending: Pending
    to: int
