"""What all processes of a run must do alike, compared: the calls of a user's own loop, what callbacks decide."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import BatchError, RunError
from fxpipe.runtime.wires.addresses import CALL, ProcessLine
from fxpipe.runtime.wires.transport import Transport

REFUSED = "a batch that was refused"

CALLS = ("step", REFUSED, "flush", "evaluate", "reset", "set_lr", "save", "load", "close")
"""What can be called. Worker 0 says `REFUSED` in place of `step` where the batch does not fit."""

ALIKE = "every process makes the same calls in the same order: decide by numbers that all of them have"

_ENDS, _SAVES, _RATES = 1, 2, 4


class Calls:
    """The calls of one process of a user's own loop, in turn: each hears which from the one before it.

        worker 0:  step ──┐      evaluate ──┐
        worker 1:  step ◄─┴──┐   save     ◄─┴── an error that names both calls, where each would wait for ever
        worker 2:  step    ◄─┘

    So a call costs one small message between neighbours, and nobody waits for a worker that it would not wait for
    anyway.

    Args:
        transport: of the worker that speaks for this process.
    """

    def __init__(self, line: ProcessLine, transport: Transport) -> None:
        self._line = line
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
        before, after, refused = self._line.before, self._line.after, CALLS.index(REFUSED)
        own, given = CALLS.index(call), 0 if shape is None else shape
        theirs = own
        if before is not None:
            self._transport.expect_note(before, note, 2)
            theirs, given = (int(number) for number in self._transport.recv_note(before, note))
        if call == "step" and theirs == refused:
            own = refused
        if after is not None:
            self._transport.send_note(after, note, torch.tensor([own, given], dtype=torch.float64))
        if theirs != own:
            raise RunError(
                f"worker {self._line.own} calls {CALLS[own]}() where worker {before} calls {CALLS[theirs]}()",
                hint=ALIKE,
            )
        if before is not None and own == refused:
            raise BatchError(
                f"worker 0 refuses the batch of this step, call {self._count}", hint="its own error says why"
            )
        return given


class Decision(NamedTuple):
    """What a callback has decided: to end the run, to save it, to set these learning rates."""

    ends: bool = False
    saves: bool = False
    rates: tuple[float, ...] | None = None

    def numbers(self) -> Tensor:
        """Two float64: what it is, and a digest of the rates."""
        rates = self.rates or ()
        what = _ENDS * self.ends + _SAVES * self.saves + _RATES * (self.rates is not None)
        digest = zlib.crc32(struct.pack(f"<{len(rates)}d", *rates))
        return torch.tensor([what, digest], dtype=torch.float64)


class Decisions:
    """What the callbacks of one process of several decide: all must decide alike, or they would part.

        last worker:  decides after step 7 ──┐
        worker k:              decides   ◄───┴──┐   an error that names both, before either decision takes effect
        worker 0:                    decides  ◄─┘

    The message goes the way of the backwards, so it has come when a worker makes the update itself: no worker waits for
    it. Where a process has several workers, the first of them speaks for all.

    Args:
        transport: of the worker that speaks for it.
    """

    def __init__(self, line: ProcessLine, transport: Transport) -> None:
        self._line = line
        self._transport = transport

    def expect(self, hook: str, step: int) -> None:
        """The next process will tell what it decides after so many steps."""
        if (after := self._line.after) is not None:
            self._transport.expect_note(after, (hook, step), 2)

    def compare(self, hook: str, step: int, decision: Decision) -> None:
        """Tell the process before, and compare with that of the next one; `expect` comes before.

        Raises:
            RunError: they differ.
        """
        own = decision.numbers()
        before, after = self._line.before, self._line.after
        if before is not None:
            self._transport.send_note(before, (hook, step), own)
        if after is None:
            return
        theirs = self._transport.recv_note(after, (hook, step))
        if not theirs.equal(own):
            next_one = _said(theirs)
            ours = "sets other learning rates" if _said(own) == next_one else _said(own)
            raise RunError(
                f"{hook}() on worker {self._line.own} {ours} after step {step}, and on worker {after} it {next_one}",
                hint="it is called in every process with the same numbers: decide by these alone, not by the time, the "
                "rank or a file",
            )


def _said(numbers: Tensor) -> str:
    what = int(numbers[0])
    words = {_ENDS: "ends the run", _SAVES: "saves it", _RATES: "sets learning rates"}
    return " and ".join(text for bit, text in words.items() if what & bit) or "does nothing"
