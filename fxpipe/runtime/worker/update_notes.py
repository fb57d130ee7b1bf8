"""Notes that neighbours send each other for an update: one up after the backwards, one down before the forwards.

    worker 0:  … B7 ◄─────────┐ update ─┐ F8 …
    worker 1:  … B7 ◄──┐ up ──┘         └─► update ─┐ F8 …
    worker 2:  … B7 up ┘                     down   └─► update  F8 …

They follow the pipeline's order: from the last worker to the first after the backwards, and from the first to the last
before the forwards. So there is no collective call, no additional waiting, and every run sees the same numbers. One
exception: if W is separate from B, a worker waits until the later workers end their minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpipe.runtime.wires.addresses import DOWN, UP
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.schedule.action import Action


class UpdateNotes:
    """The notes of one worker; there are none if no part of its update has numbers for them.

    Args:
        parts: of its update, in the order in which they measure and change gradients and weights.
    """

    def __init__(self, worker: int, workers: int, transport: Transport, parts: Sequence[UpdatePart]) -> None:
        self._transport, self._parts = transport, parts
        self._fields = fields = [part for part in parts if part.up or part.down]
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
        for part in self._parts:
            part.measure(minibatch)
        self._pass(UP, minibatch)

    def apply(self, minibatch: int) -> None:
        """Let each part do its part of the update; may wait for the note of the worker before, and other replicas."""
        if not self._with_forward:
            self._pass(DOWN, minibatch)
        for part in self._parts:
            part.apply(minibatch)

    def _pass(self, kind: str, minibatch: int) -> None:
        """Give each its numbers of one neighbour's note, and send what they return to the other neighbour."""
        if not self._fields:
            return
        source, target, counts = self._ways[kind]
        if source is None:
            heard = torch.zeros(sum(counts), dtype=torch.float64)
        else:
            heard = self._transport.recv_note(source, (kind, minibatch))
        numbers = zip(self._fields, heard.split(counts), strict=True)
        told = [field.pass_up(those) if kind == UP else field.pass_down(those) for field, those in numbers]
        if target is not None:
            self._transport.send_note(target, (kind, minibatch), torch.cat(told))
