"""Worker 0's batches in a distributed run: read when a forward needs them, or ahead where they have several shapes."""

from __future__ import annotations

from collections import deque
from typing import Any

from fxpipe.observe.watch import Watch
from fxpipe.runtime.worker.feed import Feed
from fxpipe.stages.minibatch import ShapedMinibatches


class BatchesRead:
    """The microbatches of each minibatch in turn.

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
