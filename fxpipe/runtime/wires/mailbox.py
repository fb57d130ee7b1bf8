"""Messages between workers in one process: of a pipeline that is all here, or of a rank that has several of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import EdgeSpec
from fxpipe.runtime.wires.addresses import ReplicaSeat
from fxpipe.runtime.wires.transport import Note, Transport

_Key = tuple[Any, ...]


class Mailbox:
    """Everything sent and not yet received, by the key that both ends know."""

    def __init__(self, edges: Sequence[EdgeSpec]) -> None:
        self.layouts = {edge.name: Layout(edge.sent, edge.name) for edge in edges}
        self.letters: dict[_Key, Tensor] = {}


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
        self.box.letters[edge.name, minibatch, self._seat.number(microbatch)] = letter

    def recv(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> Tensor:
        return self.box.letters.pop((edge.name, minibatch, self._seat.number(microbatch)))

    def arrived(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> bool:
        """Whether `recv` would find its value."""
        return (edge.name, minibatch, self._seat.number(microbatch)) in self.box.letters

    def send_weights(self, reader: int, version: int, ahead: int, block: Tensor) -> None:
        for place, replica in enumerate(self._seat.told(reader)):
            key = ("weights", self.worker, reader, replica, version, ahead)
            self.box.letters[key] = block.clone() if place else block

    def recv_weights(self, owner: int, version: int, ahead: int) -> Tensor:
        return self.box.letters.pop(("weights", owner, self.worker, self._seat.replica, version, ahead))

    def arrived_weights(self, owner: int, version: int, ahead: int) -> bool:
        """Whether `recv_weights` would find its block."""
        return ("weights", owner, self.worker, self._seat.replica, version, ahead) in self.box.letters

    def send_note(self, to: int, what: Note, numbers: Tensor) -> None:
        for replica in self._seat.told(to):
            self.box.letters["note", self.worker, to, replica, what] = numbers

    def recv_note(self, source: int, what: Note) -> Tensor:
        return self.box.letters.pop(("note", source, self.worker, self._seat.replica, what))

    def arrived_note(self, source: int, what: Note) -> bool:
        return ("note", source, self.worker, self._seat.replica, what) in self.box.letters


Line = Hashable
"""What leads from one worker to another: what is sent first on it is received first."""


class Loopback:
    """What workers of this process have sent each other and not yet received.

    As on other wires, the receive that was announced first gets what was sent first; but it may be waited for last.

    Attributes:
        left: what was not received, by line and place among all that travelled on it.
    """

    def __init__(self) -> None:
        self.left: dict[tuple[Line, int], Tensor] = {}
        self._counts: Counter[Line] = Counter()
        self._expected: Counter[Line] = Counter()

    def send(self, line: Line, flat: Tensor) -> None:
        """Hand over a tensor; it must not change afterwards."""
        self.left[line, self._counts[line]] = flat
        self._counts[line] += 1

    def expect(self, line: Line) -> Passing:
        """A receive of the first message of a line that has none yet."""
        self._expected[line] += 1
        return Passing(self.left, (line, self._expected[line] - 1))

    def clear(self) -> None:
        """Forget all that is under way."""
        self.left.clear()
        self._counts.clear()
        self._expected.clear()


class Passing:
    """A receive of a message within the process."""

    __slots__ = ("_key", "_sent")

    def __init__(self, sent: dict[tuple[Line, int], Tensor], key: tuple[Line, int]) -> None:
        self._sent, self._key = sent, key

    def arrived(self) -> bool:
        """Whether it was sent."""
        return self._key in self._sent

    def take(self) -> Tensor:
        """The very tensor that was sent, which has arrived."""
        return self._sent.pop(self._key)
