"""Messages between workers in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import EdgeSpec
from fxpipe.runtime.wires.transport import Note, Transport


class Mailbox:
    """Everything sent and not yet received, by the key that both ends know."""

    def __init__(self, edges: Sequence[EdgeSpec]) -> None:
        self.letters: dict[tuple[Any, ...], Tensor] = {}
        self.layouts = {edge.name: Layout(edge.tensor, edge.name) for edge in edges}


class LocalTransport(Transport):
    """One worker's end of a mailbox."""

    def __init__(self, mailbox: Mailbox, worker: int) -> None:
        self.box = mailbox.letters
        self.layouts = mailbox.layouts
        self.worker = worker

    def add(self, edges: Sequence[EdgeSpec]) -> None:
        self.layouts |= {edge.name: Layout(edge.tensor, edge.name) for edge in edges}

    def send(self, edge: EdgeSpec, minibatch: int, microbatch: int, value: Tensor) -> None:
        self.box[edge.name, minibatch, microbatch] = self.layouts[edge.name](value)

    def recv(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> Tensor:
        return self.box.pop((edge.name, minibatch, microbatch))

    def arrived(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> bool:
        """Whether `recv` would find its value."""
        return (edge.name, minibatch, microbatch) in self.box

    def send_weights(self, reader: int, version: int, ahead: int, block: Tensor) -> None:
        self.box["weights", self.worker, reader, version, ahead] = block

    def recv_weights(self, owner: int, version: int, ahead: int) -> Tensor:
        return self.box.pop(("weights", owner, self.worker, version, ahead))

    def arrived_weights(self, owner: int, version: int, ahead: int) -> bool:
        """Whether `recv_weights` would find its block."""
        return ("weights", owner, self.worker, version, ahead) in self.box

    def send_note(self, to: int, what: Note, numbers: Tensor) -> None:
        self.box["note", self.worker, to, what] = numbers

    def recv_note(self, source: int, what: Note) -> Tensor:
        return self.box.pop(("note", source, self.worker, what))

    def arrived_note(self, source: int, what: Note) -> bool:
        return ("note", source, self.worker, what) in self.box
