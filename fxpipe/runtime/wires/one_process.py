"""Workers of one process: their rows take turns, and a message arrives when it is sent."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextvars import copy_context
from functools import cache, partial
from typing import NamedTuple

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.observe.watch import Cause, Ranges
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import EdgeSpec
from fxpipe.random_state import set_torch_state, torch_state
from fxpipe.runtime.wires.addresses import Way
from fxpipe.runtime.wires.wired import Waiting

Line = Hashable
"""Identifies a line from one worker to another, whose messages are received in the order of sending."""


class Loopback:
    """Messages between workers of this process that are not received yet.

    As on other wires, the first announced receive of a line gets its first message, but it may be waited for last.
    `left` counts the messages that were not received.
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
        """A receive for the first message of a line that has no receive yet."""
        return self._next(line, sent=True)

    def clear(self) -> None:
        """Forget all messages in flight."""
        self.left = 0
        self._lines.clear()

    def _next(self, line: Line, sent: bool) -> Passing:
        """The first message that was only sent or only expected; else a new one."""
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
        """The same tensor object that was sent."""
        value, self.value = self.value, None
        assert value is not None
        self._loopback.left -= 1
        return value


def _waits(worker: int, cause: Cause) -> str:
    return f"worker {worker} waits for {cause.name} of worker {cause.worker}"


class OneProcessWires:
    """The `Wires` of one rank, when all ranks are in one process. In a run of several processes, this rank would be
    this process."""

    ordered = staged = False

    def __init__(self, plan: Plan, process: int, device: torch.device, loopback: Loopback) -> None:
        self.rank, self.device = process, device
        self._process_of, self._loopback = cache(plan.mesh.process_of), loopback

    def isend(self, value: Tensor, way: Way) -> None:
        self._loopback.send((self.rank, self._process_of(way.worker, way.replica), way.line), value)

    def irecv(self, count: int, dtype: torch.dtype, way: Way) -> Passing:
        return self._loopback.expect((self._process_of(way.worker, way.replica), self.rank, way.line))

    def stays(self, edge: EdgeSpec) -> bool:
        return True


class Turns:
    """Walks several rows in one thread, each in a greenlet. They take turns in a fixed order, the same in every run.

    Only this object may refer to a row that is held: Python's collector does not look into its frames, which refer to
    the workers and so to this object. What holds it therefore calls `end`, at the latest by a finalizer.

    If rows may draw random numbers (`draws`), each has its own state of the generator. A profiler that shows the rows'
    spans has `ranges`: a row that is held leaves its own.
    """

    def __init__(self) -> None:
        self.draws = False
        self.ranges: Ranges | None = None
        self._rows: list[greenlet] = []
        self._waiting: dict[greenlet, _Held] = {}
        self._grad = True  # outside of the rows

    def walk(self, rows: Sequence[Callable[[], None]]) -> None:
        """Walk rows to their ends. If each waits for another, that is a RunError. If a row raises an error, the others
        clean up."""
        self.begin(rows)
        self.go()

    def begin(self, rows: Sequence[Callable[[], None]]) -> None:
        """Set the rows, without walking them yet."""
        self._rows = [greenlet(partial(self._walk, row)) for row in rows]
        for row in self._rows:
            row.gr_context = copy_context()

    def go(self) -> None:
        """Walk all rows until each is at its end or idle; errors as `walk`."""
        self._grad = torch.is_grad_enabled()
        try:
            while any([self._go(row) for row in self._rows]):
                self._rows = [row for row in self._rows if not row.dead]
            if busy := [waiting.what for waiting in self._waiting.values() if not waiting.idle]:
                raise stuck(*busy)
        except BaseException:
            self.end()
            raise
        finally:
            torch.set_grad_enabled(self._grad)

    def end(self) -> None:
        """Stop all rows where they are: nothing refers to them, so they clean up; those of another thread do so there,
        when it next begins or continues a row."""
        self._waiting.clear()
        self._rows.clear()

    def _walk(self, row: Callable[[], None]) -> None:
        torch.set_grad_enabled(self._grad)  # the row before may have changed it
        row()

    def _go(self, row: greenlet) -> bool:
        waiting = self._waiting.get(row)
        if row.dead or (waiting is not None and not waiting.ready()):
            return False
        self._waiting.pop(row, None)
        row.switch()
        return True

    def wait(self, ready: Callable[[], bool], what: Callable[[], str], idle: bool = False) -> None:
        """Let other rows continue until something is ready. If none of this process can make it ready, that is a
        RunError, of which `what` says which worker waits for what. An idle row waits for what does not come from
        another row."""
        if ready():
            return
        row, parent = getcurrent(), getcurrent().parent
        if parent is None:
            raise stuck(what)
        grad, state = torch.is_grad_enabled(), torch_state() if self.draws else None
        names = [] if self.ranges is None else self.ranges.leave()
        self._waiting[row] = _Held(ready, what, idle)
        del row
        parent.switch()
        if self.ranges is not None:
            self.ranges.enter(names)
        if grad != torch.is_grad_enabled():
            torch.set_grad_enabled(grad)
        if state is not None:
            set_torch_state(state)


class _Held(NamedTuple):
    ready: Callable[[], bool]
    what: Callable[[], str]
    idle: bool


def stuck(*waiting: Callable[[], str]) -> RunError:
    """The error of rows that wait for each other."""
    return RunError(
        f"the pipeline is stuck: {'; '.join(what() for what in waiting)}",
        hint="an edited stage no longer sends what another stage waits for; without edits, this is a defect of fxpipe",
    )
