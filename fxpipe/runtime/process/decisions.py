"""What the callbacks of a run decide in each process, compared: all must decide alike, or they would part.

    last worker:  decides after step 7 ──┐
    worker k:              decides   ◄───┴──┐   an error that names both, before either decision takes effect
    worker 0:                    decides  ◄─┘

The message goes the way of the backwards, so it has come when a worker makes the update itself: no worker waits for it.
Where a process has several workers, the first of them speaks for all.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.runtime.wires.process_line import ProcessLine
from fxpipe.runtime.wires.transport import Transport

_ENDS, _SAVES, _RATES = 1, 2, 4


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
    """Those of one process of several.

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
