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

CALLS = ("step", REFUSED, "flush", "evaluate", "set_lr", "save", "load", "close")
"""What can be called. Worker 0 says `REFUSED` in place of `step` where the batch does not fit."""


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

    def make(self, call: str, number: float | None = None) -> float:
        """This process makes a call; return its number, the one of worker 0 if it is None here.

        Args:
            number: what the call is about: the shape of a batch, which worker 0 alone knows, a learning rate.

        Raises:
            RunError: the worker before makes another one, or with another number.
            BatchError: worker 0 refuses the batch.
        """
        note = (CALL, self._count)
        self._count += 1
        own = [float(CALLS.index(call)), 0.0 if number is None else float(number)]
        if self._worker:
            self._transport.expect_note(self._worker - 1, note, 2)
            theirs = self._transport.recv_note(self._worker - 1, note).tolist()
            refused = call == "step" and theirs[0] == CALLS.index(REFUSED)
            own = theirs if refused or (number is None and theirs[0] == own[0]) else own
        else:
            theirs = own
        if self._worker < self._last:
            self._transport.send_note(self._worker + 1, note, torch.tensor(own, dtype=torch.float64))
        if theirs != own:
            raise RunError(
                f"worker {self._worker} calls {_said(own)} where worker {self._worker - 1} calls {_said(theirs)}",
                hint="every process makes the same calls in the same order: decide by numbers that all of them have",
            )
        if self._worker and own[0] == CALLS.index(REFUSED):
            raise BatchError(
                f"worker 0 refuses the batch of this step, call {self._count}", hint="its own error says why"
            )
        return own[1]


def _said(made: list[float]) -> str:
    name = CALLS[int(made[0])]
    return f"set_lr({made[1]:g})" if name == "set_lr" else f"{name}()"
