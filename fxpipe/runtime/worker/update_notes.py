"""Notes that neighbours send each other for an update: one up after the backwards, one down before the forwards.

    worker 0:  … B7 ◄─────────┐ update ─┐ F8 …
    worker 1:  … B7 ◄──┐ up ──┘         └─► update ─┐ F8 …
    worker 2:  … B7 up ┘                     down   └─► update  F8 …

They follow the pipeline's order: from the last worker to the first after the backwards, and from the first to the last
before the forwards. So there is no collective call, no additional waiting, and every run sees the same numbers. One
exception: if W is separate from B, a worker waits until the later workers end their minibatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.runtime.wires.addresses import DOWN, UP
from fxpipe.runtime.wires.transport import Transport
from fxpipe.schedule.action import Action


class NoteField(ABC):
    """Some numbers in the notes of each update, and what a worker does with them.

    Attributes:
        up: how many numbers come up from the next worker.
        down: how many come down from the worker before.
        with_forward: they come down with the first forward of a minibatch, not before its update.
    """

    up: int
    down: int
    with_forward: bool = False

    def begin(self) -> None:  # noqa: B027
        """The pipeline is empty."""

    def state(self) -> Any:
        """What forwards that are repeated after an interruption need, as plain values."""
        return None

    def load(self, state: Any, same: bool) -> None:  # noqa: B027
        """Continue from what `state` gave: of this worker if the cuts are the `same`, else of some worker."""

    @abstractmethod
    def measure(self, minibatch: int, parameters: Sequence[nn.Parameter]) -> None:
        """The minibatch's gradients are complete on this worker: compute its own numbers."""

    @abstractmethod
    def pass_up(self, behind: Tensor) -> Tensor:
        """What to send up, from this worker's numbers and those received; the last worker receives zeros."""

    @abstractmethod
    def pass_down(self, before: Tensor) -> Tensor:
        """What to send down, from what this worker knows and has received; worker 0 receives zeros."""

    @abstractmethod
    def apply(self, minibatch: int, parameters: Sequence[nn.Parameter]) -> None:
        """All notes have arrived: change the gradients in place."""


class UpdateNotes:
    """The notes of one worker; there are none without fields.

    Args:
        parameters: whose gradients the fields measure and change.

    Attributes:
        fields: in the order in which they measure and change gradients.
    """

    def __init__(
        self,
        worker: int,
        workers: int,
        transport: Transport,
        fields: Sequence[NoteField],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._transport, self.fields, self._parameters = transport, fields, parameters
        before = worker - 1 if fields and worker else None
        behind = worker + 1 if fields and worker + 1 < workers else None
        self._ways = {
            UP: (behind, before, [field.up for field in fields]),
            DOWN: (before, behind, [field.down for field in fields]),
        }
        self._with_forward = any(field.with_forward for field in fields)

    def expect(self, action: Action | None, updated: int | None) -> None:
        """Announce to the transport the notes that an action needs, some actions before it.

        Args:
            action: None for a flush.
            updated: the minibatch whose update is part of it, if any.
        """
        down = updated
        if self._with_forward:
            down = action.minibatch if action is not None and (action.phase, action.microbatch) == ("F", 0) else None
        for kind, minibatch in ((UP, updated), (DOWN, down)):
            source, _, counts = self._ways[kind]
            if minibatch is not None and source is not None:
                self._transport.expect_note(source, (kind, minibatch), sum(counts))

    def forward(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run."""
        if self._with_forward:
            self._pass(DOWN, minibatch)

    def announce(self, minibatch: int) -> None:
        """The gradients are complete on this worker: wait for the note of the next, then send one up."""
        for field in self.fields:
            field.measure(minibatch, self._parameters)
        self._pass(UP, minibatch)

    def apply(self, minibatch: int) -> None:
        """Change the gradients in place; may wait for the note of the worker before."""
        if not self._with_forward:
            self._pass(DOWN, minibatch)
        for field in self.fields:
            field.apply(minibatch, self._parameters)

    def _pass(self, kind: str, minibatch: int) -> None:
        """Give each field its part of one neighbour's note, and send what the fields return to the other neighbour."""
        if not self.fields:
            return
        source, target, counts = self._ways[kind]
        if source is None:
            heard = torch.zeros(sum(counts), dtype=torch.float64)
        else:
            heard = self._transport.recv_note(source, (kind, minibatch))
        parts = zip(self.fields, heard.split(counts), strict=True)
        told = [field.pass_up(part) if kind == UP else field.pass_down(part) for field, part in parts]
        if target is not None:
            self._transport.send_note(target, (kind, minibatch), torch.cat(told))
