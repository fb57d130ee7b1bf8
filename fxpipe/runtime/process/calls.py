"""All processes of a user's own loop make the same calls: each hears from the one before it which it makes.

    worker 0:  step ──┐      evaluate ──┐
    worker 1:  step ◄─┴──┐   save     ◄─┴── an error that names both calls, where each would wait for ever
    worker 2:  step    ◄─┘

So a call costs one small message between neighbours, and nobody waits for a worker that it would not wait for anyway.
"""

from __future__ import annotations

import torch

from fxpipe.errors import BatchError, RunError
from fxpipe.runtime.wires.addresses import CALL
from fxpipe.runtime.wires.transport import Transport

REFUSED = "a batch that was refused"

CALLS = ("step", REFUSED, "flush", "evaluate", "reset", "set_lr", "save", "load", "close")
"""What can be called. Worker 0 says `REFUSED` in place of `step` where the batch does not fit."""

ALIKE = "every process makes the same calls in the same order: decide by numbers that all of them have"


class Calls:
    """The calls of one process, in turn.

    Args:
        workers: how many processes there are.
    """

    def __init__(self, worker: int, workers: int, transport: Transport) -> None:
        self._worker = worker
        self._last = workers - 1
        self._transport = transport
        self._count = 0

    def make(self, call: str, shape: int | None = None) -> int:
        """This process makes a call; return the shape that worker 0 gives with it.

        Args:
            shape: of a batch, on worker 0.

        Raises:
            RunError: the worker before makes another call.
            BatchError: worker 0 refuses the batch.
        """
        note = (CALL, self._count)
        self._count += 1
        own, given = CALLS.index(call), 0 if shape is None else shape
        theirs = own
        if self._worker:
            self._transport.expect_note(self._worker - 1, note, 2)
            theirs, given = (int(number) for number in self._transport.recv_note(self._worker - 1, note))
        refused = CALLS.index(REFUSED)
        if call == "step" and theirs == refused:
            own = refused
        if self._worker < self._last:
            self._transport.send_note(self._worker + 1, note, torch.tensor([own, given], dtype=torch.float64))
        if theirs != own:
            raise RunError(
                f"worker {self._worker} calls {CALLS[own]}() where worker {self._worker - 1} calls {CALLS[theirs]}()",
                hint=ALIKE,
            )
        if self._worker and own == refused:
            raise BatchError(
                f"worker 0 refuses the batch of this step, call {self._count}", hint="its own error says why"
            )
        return given
