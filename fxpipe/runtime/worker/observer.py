"""What a run tells those who follow it: whoever wants to hear of something overrides its method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fxpipe.checkpoint.shard import Shard


class Observer:
    """Follows a worker (in its executor's list), the rows of a process, or the run; what it hears of does nothing.

    A worker tells `begins`, `loss`, `ended` and `leaving`; a row `begins`, `loss` and `between`; a run what comes then.
    """

    def begins(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run on the worker, or in the row."""

    def loss(self, minibatch: int, value: Tensor) -> None:
        """The loss worker knows a minibatch's loss, with its metrics after it.

        An executor tells before the backward, or where there are replicas, before the update: an error stops it. A row
        tells when it hears of it, of each replica of that worker.
        """

    def ended(self, minibatch: int) -> None:
        """All gradients of a minibatch are made on the worker; its update is yet to begin."""

    def leaving(self, version: int) -> None:
        """The worker's live version is about to be replaced."""

    def between(self, executors: Sequence[Any]) -> None:
        """Between two actions of a row: it begins, or all its workers (`Executor`) have made another update."""

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """All workers have evaluated a version, and all else that follows from it is done."""

    def ends(self, total: int) -> None:
        """The run ends after so many steps, perhaps fewer than it was to have."""

    def cut(self, worker: int, shard: Shard) -> None:
        """A worker's first replica has a shard of a checkpoint: the place for what the run is to find there again."""

    def saves(self, step: int) -> None:
        """All files of a checkpoint are there, and it is about to count; told by the thread that writes."""

    def stops(self, step: int, saved: Path | None) -> None:
        """The last checkpoint of a run that stops stands in a folder, or is given up (None); told by that thread."""
