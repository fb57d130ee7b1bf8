"""What the processes of a run send each other for each minibatch, but losses: shapes, calls, decisions of callbacks."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import BatchError, RunError
from fxpipe.observe.watch import Watch
from fxpipe.plan.plan import Plan
from fxpipe.policy.demand import Demand
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.training_loop import Limit
from fxpipe.runtime.wires.addresses import CALL, ProcessLine
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.captures import Due
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.feed import Feed
from fxpipe.runtime.worker.observer import Observer
from fxpipe.runtime.worker.state_of_hooks import StateOfHooks
from fxpipe.schedule.action import LOOKAHEAD
from fxpipe.stages.minibatch import ShapedMinibatches

AHEAD = LOOKAHEAD + 1
"""Minibatches: receives are posted for none after these."""


def several_shapes(plan: Plan, options: PipelineOptions) -> bool:
    """Whether batches of a run may have several shapes: then worker 0 reads ahead, and sends the shapes."""
    return len(plan.steps) > 1 or bool(options.new_shapes)


def ahead(demand: Demand, shapes: bool) -> int:
    """How many minibatches after the one that it begins a worker may already expect something of: weights, or shapes.

    Args:
        shapes: batches have several shapes, so worker 0 reads ahead.
    """
    reach = max(demand.reach(owner) for owner in range(demand.plan.workers))  # readers of expected weights
    return reach + 1 + (AHEAD if shapes else 0)


REFUSED = "a batch that was refused"

CALLS = ("step", REFUSED, "flush", "evaluate", "reset", "set_lr", "save", "load", "close")
"""What can be called; a run makes only steps. Worker 0 sends `REFUSED` for `step` if the batch does not fit."""

ALIKE = "every process must make the same calls in the same order: decide by numbers that all of them have"


class Calls:
    """Compares the calls of several processes: each sends its call, and a batch's shape, to the process after it.

        worker 0:  step ──┐      evaluate ──┐
        worker 1:  step ◄─┴──┐   save     ◄─┴── an error that names both calls, where each would wait for ever
        worker 2:  step    ◄─┘

    A call costs one small message between neighbours, and no process waits for a worker that it does not wait for
    anyway.

    Args:
        executors: of this process.
    """

    def __init__(self, line: ProcessLine, executors: Sequence[Executor]) -> None:
        self._line = line
        self._transport = next(each.transport for each in executors if each.worker == line.own)
        self._count = 0

    def make(self, call: str, shape: int | None = None) -> int:
        """Make a call in this process; return the shape that worker 0 sends with it.

        Args:
            shape: of a batch, on worker 0.

        Raises:
            RunError: the worker before this one makes another call.
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
                f"worker {self._line.own} calls {CALLS[own]}(), but worker {before} calls {CALLS[theirs]}()", hint=ALIKE
            )
        if before is not None and own == refused:
            raise BatchError(
                f"worker 0 refuses the batch of this step, call {self._count}", hint="its own error says why"
            )
        return given


class ComingShapes(Calls, Observer):
    """The steps of one process of a run, and their shapes: worker 0 reads ahead.

    A worker posts receives before it needs them (`training_loop`), and must know the shapes by then. So a minibatch's
    shape is sent when the first forward of a minibatch `AHEAD` before it begins. A worker begins that forward after the
    worker before it, so no worker waits for a shape that is not yet sent.

    Args:
        limit: of the rows, whose end may come nearer, on all workers at the same version.
        read: on worker 0, reads a minibatch and returns its shape; called for each in turn.
        prepare: called with each shape before this process uses it.
    """

    def __init__(
        self,
        line: ProcessLine,
        executors: Sequence[Executor],
        limit: Limit,
        read: Callable[[int], int] | None,
        prepare: Callable[[int], None],
    ) -> None:
        super().__init__(line, executors)
        self._executors, self._limit, self._read, self._prepare = executors, limit, read, prepare
        self._shapes: dict[int, int] = {}

    def __call__(self, minibatch: int) -> int:
        """The shape of a minibatch in flight, or of one of the next minibatches."""
        return self._shapes[minibatch]

    def begin(self, step: int = 0) -> None:
        """Learn the first shapes, of the minibatches from `step` on."""
        self._next = step
        self.begins(step - 1)

    def begins(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run: learn another shape, and forget those no longer needed."""
        assert self._limit.end is not None
        while self._next < min(minibatch + AHEAD + 1, self._limit.end):
            shape = self.make("step", None if self._read is None else self._read(self._next))
            self._prepare(shape)
            self._shapes[self._next] = shape
            self._next += 1
        oldest = min(executor.store.version for executor in self._executors) - 1  # its loss may not be reported yet
        for old in [known for known in self._shapes if known < oldest]:
            del self._shapes[old]


class BatchesRead:
    """Worker 0's microbatches of each minibatch in turn: read when a forward needs them, or ahead for several shapes.

    Args:
        due: whether a checkpoint follows this many minibatches; known before the next one is read.
        hooks: follows what reading batches changes; None if the step reads nothing that hooks reach.

    Attributes:
        ahead: `read` reads minibatches before they are due.
    """

    def __init__(
        self,
        feed: Feed,
        minibatches: ShapedMinibatches,
        watch: Watch,
        ahead: bool,
        due: Due,
        hooks: StateOfHooks | None = None,
    ) -> None:
        self.ahead, self._due, self._hooks = ahead, due, hooks
        self._feed, self._minibatches, self._watch = feed, minibatches, watch
        self._read: deque[list[tuple[Any, ...]]] = deque()

    def __call__(self, minibatch: int) -> list[tuple[Any, ...]]:
        """The microbatches of a minibatch that is due."""
        return self._read.popleft() if self.ahead else self._next(minibatch)[1]

    def read(self, minibatch: int) -> int:
        """Read a minibatch before it is due; return its shape."""
        self._watch.open("data")
        shape, leaves = self._next(minibatch)
        self._watch.close()
        self._read.append(leaves)
        return shape

    def _next(self, minibatch: int) -> tuple[int, list[tuple[Any, ...]]]:
        due, hooks = self._due(minibatch), self._hooks
        if hooks is not None:
            hooks.reads(minibatch, due)
        batch = self._feed.next_batch(due)
        if hooks is not None:
            hooks.has_read(minibatch)
        return self._minibatches(batch, minibatch)


_ENDS, _SAVES, _RATES = 1, 2, 4


class Decision(NamedTuple):
    """What a callback has decided: to end the run, to save it, to set these learning rates."""

    ends: bool = False
    saves: bool = False
    rates: tuple[float, ...] | None = None

    def numbers(self) -> Tensor:
        """Two float64: which decisions, and a digest of the rates."""
        rates = self.rates or ()
        what = _ENDS * self.ends + _SAVES * self.saves + _RATES * (self.rates is not None)
        digest = zlib.crc32(struct.pack(f"<{len(rates)}d", *rates))
        return torch.tensor([what, digest], dtype=torch.float64)


class Decisions:
    """Compares what callbacks decide in several processes: all must decide alike.

        last worker:  decides after step 7 ──┐
        worker k:              decides   ◄───┴──┐   an error that names both, before either decision takes effect
        worker 0:                    decides  ◄─┘

    The messages follow the backwards, so they have come when a worker makes its own update: no worker waits for them.
    Where a process has several workers, the first of them sends for all.

    Args:
        transport: of the worker that sends for this process.
    """

    def __init__(self, line: ProcessLine, transport: Transport) -> None:
        self._line = line
        self._transport = transport

    def expect(self, hook: str, step: int) -> None:
        """Expect the next process's decision after this many steps."""
        if (after := self._line.after) is not None:
            self._transport.expect_note(after, (hook, step), 2)

    def compare(self, hook: str, step: int, decision: Decision) -> None:
        """Send the decision to the process before, and compare it with the next process's; call `expect` first.

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
                hint="it is called in every process with the same numbers: decide by these only, not by the time, the "
                "rank or a file",
            )


def _said(numbers: Tensor) -> str:
    what = int(numbers[0])
    words = {_ENDS: "ends the run", _SAVES: "saves it", _RATES: "sets learning rates"}
    return " and ".join(text for bit, text in words.items() if what & bit) or "does nothing"
