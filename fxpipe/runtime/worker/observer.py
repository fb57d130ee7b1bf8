"""The events of a run: an observer overrides the methods of those that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fxpipe.checkpoint.shard import Shard


class Observer:
    """Follows a worker (in its executor's list), the rows of a process, or the run; every method here does nothing.

    A worker calls `begins`, `loss`, `ended` and `leaving`; a row `begins` and `between`; a run the others. Each event
    reaches the observers in the order of their list.
    """

    each_replica = False
    """Whether `cut` is called for all replicas that make shards, not only for the first."""

    def begins(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run on the worker, or in the row."""

    def loss(self, minibatch: int, value: Tensor) -> None:
        """The loss worker knows a minibatch's loss, followed by its metrics.

        It is called before the backward, or with replicas before the update: an error stops it.
        """

    def ended(self, minibatch: int) -> None:
        """All gradients of a minibatch are made on the worker; its update has not begun."""

    def leaving(self, version: int) -> None:
        """The worker's live version is about to be replaced."""

    def between(self, executors: Sequence[Any]) -> None:
        """Between two actions of a row: the row begins, or all its workers (`Executor`) have made another update."""

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """All workers have evaluated a version, and everything that follows from it is done."""

    def ends(self, total: int) -> None:
        """The run ends after this many steps, perhaps fewer than planned."""

    def cut(self, worker: int, shard: Shard) -> None:
        """A worker has made a shard of a checkpoint: add what the run needs to resume."""

    def saves(self, step: int) -> None:
        """All files of a checkpoint are written, and it is about to be valid; called by the writing thread."""

    def stops(self, step: int, saved: Path | None, then: str) -> None:
        """The last checkpoint of a stopping run is in a folder, or has failed (None); called by the writing thread.

        Args:
            then: what follows, which worker 0's process has decided.
        """
