"""Wires between ranks that are all in this process: a message is there as soon as it is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpipe.plan.spec import EdgeSpec, Plan
from fxpipe.plan.urgency import URGENT
from fxpipe.runtime.wires.addresses import Channel
from fxpipe.runtime.wires.mailbox import Line, Loopback, Passing
from fxpipe.runtime.wires.turns import Turns


class OneProcessWires:
    """The `Wires` of one rank; see there.

    Args:
        process: the one of the run that would have the rank, if each had its own.
        loopback: of all ranks.
        turns: theirs.
    """

    ordered = staged = False

    def __init__(self, plan: Plan, process: int, device: torch.device, loopback: Loopback, turns: Turns) -> None:
        self.rank, self.device, self.turns = process, device, turns
        self._plan, self._loopback = plan, loopback

    def isend(
        self,
        flat: Tensor,
        to: int,
        channel: Channel | None,
        tag: int | None = None,
        turn: int = URGENT,
        replica: int = 0,
    ) -> None:
        self._loopback.send(self._line(self.rank, self._plan.process_of(to, replica), channel, tag), flat)

    def irecv(
        self,
        count: int,
        dtype: torch.dtype,
        source: int,
        channel: Channel | None,
        tag: int | None = None,
        turn: int = URGENT,
        replica: int = 0,
    ) -> Passing:
        return self._loopback.expect(self._line(self._plan.process_of(source, replica), self.rank, channel, tag))

    def stays(self, edge: EdgeSpec) -> bool:
        return True

    def passing(self, pending: Passing) -> Passing:
        return pending

    def _line(self, source: int, target: int, channel: Channel | None, tag: int | None) -> Line:
        return source, target, channel if tag is None else tag
