"""Wires between workers of one process: a message is there as soon as it is sent."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from functools import cache

import torch
from torch import Tensor

from fxpipe.observe.watch import Cause
from fxpipe.plan.spec import EdgeSpec, Plan
from fxpipe.runtime.wires.addresses import Way
from fxpipe.runtime.wires.turns import Turns
from fxpipe.runtime.wires.wired import Waiting

Line = Hashable
"""What leads from one worker to another: what is sent first on it is received first."""


class Loopback:
    """What workers of this process have sent each other and not yet received.

    As on other wires, the receive that was announced first gets what was sent first; but it may be waited for last.

    Args:
        turns: of the rows in this process; None where none waits for another.

    Attributes:
        left: how many messages were not received.
    """

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = turns or Turns()
        self.left = 0
        self._lines: defaultdict[Line, deque[Passing]] = defaultdict(deque)  # sent or expected first, never both

    def send(self, line: Line, value: Tensor) -> None:
        """Hand over a tensor; it must not change afterwards."""
        self.left += 1
        self._next(line, sent=False).value = value

    def expect(self, line: Line) -> Passing:
        """A receive of the first message of a line that has none yet."""
        return self._next(line, sent=True)

    def clear(self) -> None:
        """Forget all that is under way."""
        self.left = 0
        self._lines.clear()

    def _next(self, line: Line, sent: bool) -> Passing:
        """The first message that was sent, or expected, alone; else a new one."""
        waiting = self._lines[line]
        if waiting and waiting[0].here == sent:
            return waiting.popleft()
        waiting.append(Passing(self))
        return waiting[-1]


class Passing:
    """A receive of a message within the process."""

    __slots__ = ("_loopback", "value")

    def __init__(self, loopback: Loopback) -> None:
        self._loopback = loopback
        self.value: Tensor | None = None

    @property
    def here(self) -> bool:
        return self.value is not None

    def wait(self, what: Waiting) -> None:
        self._loopback.turns.wait(lambda: self.value is not None, lambda: _waits(*what))

    def take(self) -> Tensor:
        """The very tensor that was sent."""
        value, self.value = self.value, None
        assert value is not None
        self._loopback.left -= 1
        return value


def _waits(worker: int, cause: Cause) -> str:
    return f"worker {worker} waits for {cause.name} of worker {cause.worker}"


class OneProcessWires:
    """The `Wires` of one rank; see there.

    Args:
        process: the one of the run that would have the rank, if each had its own.
        loopback: of all ranks.
    """

    ordered = staged = False

    def __init__(self, plan: Plan, process: int, device: torch.device, loopback: Loopback) -> None:
        self.rank, self.device = process, device
        self._process_of, self._loopback = cache(plan.process_of), loopback

    def isend(self, value: Tensor, way: Way) -> None:
        self._loopback.send((self.rank, self._process_of(way.worker, way.replica), way.line), value)

    def irecv(self, count: int, dtype: torch.dtype, way: Way) -> Passing:
        return self._loopback.expect((self._process_of(way.worker, way.replica), self.rank, way.line))

    def stays(self, edge: EdgeSpec) -> bool:
        return True
