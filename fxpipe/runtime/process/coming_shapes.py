"""Which shape the batches of coming minibatches have: worker 0 reads ahead, and each process tells the next one.

A worker posts receives before it needs them (`training_loop`), and must know by then what will come. So a minibatch's
shape is told when the first forward of an earlier one begins, `AHEAD` minibatches before: that forward cannot begin on
a worker before it has begun on the one before, so that none waits for a message that is not under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from fxpipe.observe.watch import Watch
from fxpipe.plan.spec import Plan
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.wires.addresses import BATCH, ProcessLine
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.feed import Feed
from fxpipe.schedule.action import LOOKAHEAD
from fxpipe.stages.minibatch import ShapedMinibatches

AHEAD = LOOKAHEAD + 1
"""Minibatches: none of the actions whose receives are posted is of a later one."""


def several_shapes(plan: Plan, options: PipelineOptions) -> bool:
    """Whether batches of a run may have several shapes: then worker 0 reads ahead, and tells them."""
    return bool(plan.shapes) or bool(options.new_shapes)


class ComingShapes:
    """The shapes that one process of a distributed run knows.

    Args:
        transport: of the worker that speaks for it.
        total: how many minibatches the run has; may be set to fewer, on all workers at the same version.
        read: on worker 0, reads a minibatch and returns its shape; called for each in turn.
        hear: elsewhere, called with each shape that this process hears, before it may have to do with it.
    """

    def __init__(
        self,
        line: ProcessLine,
        transport: Transport,
        total: int,
        read: Callable[[int], int] | None,
        hear: Callable[[int], None] = lambda shape: None,
    ) -> None:
        self._hear = hear
        self._line = line
        self._transport = transport
        self.total = total
        self._read = read
        self._shapes: dict[int, int] = {}

    def __call__(self, minibatch: int) -> int:
        """The shape of a minibatch in flight, or of one of the next."""
        return self._shapes[minibatch]

    def begin(self, step: int = 0) -> None:
        """Learn the first shapes; those of the minibatches from `step` on."""
        for minibatch in range(step, min(step + AHEAD, self.total)):
            self._learn(minibatch)

    def reach(self, minibatch: int, version: int) -> None:
        """The forward of a minibatch is about to begin: learn another shape.

        Args:
            version: how many updates this worker has made: the minibatches before are forgotten.
        """
        if minibatch + AHEAD < self.total:
            self._learn(minibatch + AHEAD)
        for old in [known for known in self._shapes if known < version]:
            del self._shapes[old]

    def _learn(self, minibatch: int) -> None:
        note = (BATCH, minibatch)
        before, after = self._line.before, self._line.after
        if self._read is not None:
            shape = self._read(minibatch)
        else:
            assert before is not None
            self._transport.expect_note(before, note, 1)
            shape = int(self._transport.recv_note(before, note)[0])
        if after is not None:
            self._transport.send_note(after, note, torch.tensor([shape], dtype=torch.float64))
        if self._read is None:
            self._hear(shape)
        self._shapes[minibatch] = shape


class BatchesRead:
    """Worker 0's microbatches of each minibatch in turn: read when a forward needs them, or ahead for several shapes.

    Attributes:
        ahead: minibatches are read before they are due, by `read`.
    """

    def __init__(self, feed: Feed, minibatches: ShapedMinibatches, watch: Watch, ahead: bool) -> None:
        self.ahead = ahead
        self._feed, self._minibatches, self._watch = feed, minibatches, watch
        self._read: deque[list[tuple[Any, ...]]] = deque()

    def __call__(self, minibatch: int) -> list[tuple[Any, ...]]:
        """Those of a minibatch that is due."""
        return self._read.popleft() if self.ahead else self._next(minibatch)[1]

    def read(self, minibatch: int) -> int:
        """Read a minibatch before it is due; returns its shape."""
        self._watch.open("data")
        shape, leaves = self._next(minibatch)
        self._watch.close()
        self._read.append(leaves)
        return shape

    def _next(self, minibatch: int) -> tuple[int, list[tuple[Any, ...]]]:
        return self._minibatches(self._feed.next_batch(), minibatch)
