"""Messages between workers in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import EdgeSpec
from fxpipe.plan.urgency import URGENT, turn_of
from fxpipe.planner.links import Links
from fxpipe.policy.demand import Demand
from fxpipe.runtime.wires.meter import Letter, Meter
from fxpipe.runtime.wires.replica_seat import ReplicaSeat
from fxpipe.runtime.wires.transport import Note, Transport

_Key = tuple[Any, ...]


class Mailbox:
    """Everything sent and not yet received, by the key that both ends know.

    Args:
        throttle: the links that letters are to take as long as; None where they arrive at once.
        demand: who reads whose weights; None where no weights are sent.
        placement: the rank of each worker, between which the links are; empty where worker k is on rank k, and where
            the mailbox has the letters of several replicas, whose processes have links.
    """

    def __init__(
        self,
        edges: Sequence[EdgeSpec],
        throttle: Links | None = None,
        demand: Demand | None = None,
        placement: Sequence[int] = (),
    ) -> None:
        self.layouts = {edge.name: Layout(edge.sent, edge.name) for edge in edges}
        self.throttle = throttle
        self.letters: dict[_Key, Tensor] = {}
        self._demand = demand
        self._arrives: dict[_Key, int | Letter] = {}
        self._awaited: list[int] = []
        self._meter = None if throttle is None else Meter(throttle)
        self._placement = placement

    def put(self, source: int, to: int, key: _Key, letter: Tensor, turn: int = URGENT) -> None:
        """A worker sends a letter; with a throttle, it may have to wait its turn."""
        self.letters[key] = letter
        if self._meter is None:
            return
        if self._placement:
            source, to = self._placement[source], self._placement[to]
        if source == to:
            self._arrives[key] = 0
        elif turn == URGENT:
            self._arrives[key] = self._meter.send(source, to, letter.nbytes)
        else:
            self._arrives[key] = self._meter.put(source, to, letter.nbytes, turn)

    def turn(self, owner: int, reader: int) -> int:
        """The turn of weights that an owner sends a reader."""
        return URGENT if self._demand is None else self._demand.turn(owner, reader)

    def take(self, key: _Key) -> Tensor:
        """A letter that was sent, as soon as it arrives."""
        if self._meter is not None:
            self._meter.hold(self._expected(key))
            del self._arrives[key]
        return self.letters.pop(key)

    def has(self, key: _Key) -> bool:
        """Whether a letter has arrived."""
        if key not in self.letters or self._meter is None:
            return key in self.letters
        expected = self._expected(key)
        if self._meter.is_due(expected):
            return True
        self._awaited.append(expected)
        return False

    def rest(self) -> bool:
        """Wait until the first letter arrives that was asked for and was still under way; False where none was."""
        if self._meter is None or not self._awaited:
            return False
        self._meter.hold(min(self._awaited))
        self._awaited.clear()
        return True

    def clear(self) -> None:
        """Forget all letters."""
        self.letters.clear()
        self._arrives.clear()
        self._awaited.clear()

    def _expected(self, key: _Key) -> int:
        """When a letter arrives if none is sent before; the workers are of one thread, so who waits sends none."""
        assert self._meter is not None
        arrives = self._arrives[key]
        return arrives if isinstance(arrives, int) else self._meter.expected(arrives)


class LocalTransport(Transport):
    """One worker's end of a mailbox.

    Args:
        seat: which replica it is of, where the mailbox has the letters of several.
    """

    def __init__(self, mailbox: Mailbox, worker: int, seat: ReplicaSeat | None = None) -> None:
        self.box = mailbox
        self.layouts = mailbox.layouts
        self.worker = worker
        self._seat = seat or ReplicaSeat(worker)

    def add(self, edges: Sequence[EdgeSpec]) -> None:
        self.layouts |= {edge.name: Layout(edge.sent, edge.name) for edge in edges}

    def send(self, edge: EdgeSpec, minibatch: int, microbatch: int, value: Tensor) -> None:
        letter = self.layouts[edge.name](value)
        turn = turn_of(edge.kind, edge.sent.bytes)
        key = (edge.name, minibatch, self._seat.number(microbatch))
        self._put(edge.dst, self._seat.peer(edge.dst, microbatch), key, letter, turn)

    def recv(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> Tensor:
        return self.box.take((edge.name, minibatch, self._seat.number(microbatch)))

    def arrived(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> bool:
        """Whether `recv` would find its value."""
        return self.box.has((edge.name, minibatch, self._seat.number(microbatch)))

    def send_weights(self, reader: int, version: int, ahead: int, block: Tensor) -> None:
        turn = self.box.turn(self.worker, reader)
        for place, replica in enumerate(self._seat.told(reader)):
            key = ("weights", self.worker, reader, replica, version, ahead)
            self._put(reader, replica, key, block.clone() if place else block, turn)

    def recv_weights(self, owner: int, version: int, ahead: int) -> Tensor:
        return self.box.take(("weights", owner, self.worker, self._seat.replica, version, ahead))

    def arrived_weights(self, owner: int, version: int, ahead: int) -> bool:
        """Whether `recv_weights` would find its block."""
        return self.box.has(("weights", owner, self.worker, self._seat.replica, version, ahead))

    def send_note(self, to: int, what: Note, numbers: Tensor) -> None:
        for replica in self._seat.told(to):
            self._put(to, replica, ("note", self.worker, to, replica, what), numbers)

    def recv_note(self, source: int, what: Note) -> Tensor:
        return self.box.take(("note", source, self.worker, self._seat.replica, what))

    def arrived_note(self, source: int, what: Note) -> bool:
        return self.box.has(("note", source, self.worker, self._seat.replica, what))

    def _put(self, to: int, replica: int, key: _Key, letter: Tensor, turn: int = URGENT) -> None:
        self.box.put(self._seat.end(), self._seat.end(to, replica), key, letter, turn)
