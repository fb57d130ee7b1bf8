"""Evaluation over worker processes: batches enter at worker 0 and go down the pipeline, several at a time.

    worker 0     reads a batch, tells the next worker its shape, runs its code
    worker k     hears the shape, passes it on, runs its code: receives, sends, keeps its metrics
    at the end   metrics go to worker 0; once it has all of them, a word goes down the line, and all train on

A worker waits for no worker after it but for what it sent two batches before, so that no worker runs far ahead. It
hears of a batch, and posts its receives, before it works on the batch before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.plan.spec import Plan
from fxpipe.runtime.wires.addresses import Addresses
from fxpipe.runtime.wires.distributed import DistTransport, Wires
from fxpipe.runtime.wires.moves import evaluation_edges, moves
from fxpipe.runtime.worker.evaluation_data import EvaluationData, Placed
from fxpipe.runtime.worker.evaluator import Evaluator, means

AHEAD = 2
"""Batches for which a worker may have sent values that no worker has taken yet."""

_OVER = -1
"""In place of a shape: there are no more batches, or, said once more, all metrics have come."""


class DistributedEvaluation:
    """One process's end of a run's evaluations.

    Args:
        folder: of the build.
        seed: of the run.
        data: the batches, on worker 0 alone.

    Raises:
        BuildError: as `Evaluator`.
    """

    def __init__(
        self,
        plan: Plan,
        folder: str,
        seed: int,
        wires: Wires,
        addresses: Addresses,
        data: EvaluationData | None,
    ) -> None:
        self.plan = plan
        self.worker = wires.worker
        self._transport = DistTransport(plan, wires.worker, wires, addresses, evaluation_edges(plan), 1, AHEAD)
        self.evaluator = Evaluator(plan, wires.worker, folder, seed, self._transport)
        self._data = data
        self._batches: Iterator[Placed] | None = None
        self._moves = moves(plan)
        self._fixed: dict[str, Tensor] = {}  # moved once and for all
        self._given: set[str] = set()  # likewise, of this worker's own: names of messages
        self._upcoming: _Batch | None = None

    def await_start(self) -> None:
        """Wait until worker 0 has begun, if this is another one."""
        if self.worker:
            self._begin()

    def run(self, state: dict[str, Tensor]) -> dict[str, float] | None:
        """One evaluation; every worker calls it at the same point of its training.

        Args:
            state: this worker's tensors (see `Executor.state`); they must not change meanwhile.

        Returns:
            The mean of every metric on worker 0, None elsewhere.

        Raises:
            FxpipeError: the data, or what was made of them, failed; or another worker did.
        """
        if self._upcoming is None:
            self._begin()
        state = {**state, **self._exchange(state)}
        shapes: list[int] = []
        values: list[Tensor] = []
        upcoming, self._upcoming = self._upcoming, None
        assert upcoming is not None
        while upcoming.shape != _OVER:
            number = len(shapes)
            batch, upcoming = upcoming, self._hear(number + 1)
            self._transport.set_order(self.plan.evaluations[batch.shape].edges)
            values += self.evaluator.run(batch.shape, number, state, batch.leaves)
            shapes.append(batch.shape)
            self._transport.done("F", number, 0)
        found = self._gather(shapes, values)
        self._transport.finish()
        self._pass_word()
        return found

    def _begin(self) -> None:
        self._batches = None if self._data is None else self._data()
        self._transport.set_order(())
        for move in self._moves:
            if move.reader == self.worker and move.name not in self._fixed:
                self._transport.expect(move.edge, 0, 0)
        self._upcoming = self._hear(0)

    def _exchange(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send what others read of this worker's tensors; what it reads of theirs."""
        for move in self._moves:
            if move.source == self.worker and move.edge.name not in self._given:
                self._transport.send(move.edge, 0, 0, state[move.name])
                if move.once:
                    self._given.add(move.edge.name)
        found = dict(self._fixed)
        for move in self._moves:
            if move.reader == self.worker and move.name not in self._fixed:
                found[move.name] = self._transport.recv(move.edge, 0, 0)
                if move.once:
                    self._fixed[move.name] = found[move.name]
        return found

    def _hear(self, number: int) -> _Batch:
        """What batch comes next; the next worker is told, and this batch's receives are posted."""
        if self._batches is not None:
            batch = _Batch(*next(self._batches, (_OVER, None)))
        else:
            batch = _Batch(int(self._numbers(self.worker - 1, "shape", 1)[0]), None)
        self._tell(batch.shape)
        if batch.shape != _OVER:
            for edge in self.plan.evaluations[batch.shape].edges:
                if edge.dst == self.worker:
                    self._transport.expect(edge, number, 0)
        return batch

    def _tell(self, shape: int) -> None:
        if self.worker < self.plan.workers - 1:
            self._transport.send_note(self.worker + 1, ("shape", 0), torch.tensor([shape], dtype=torch.float64))

    def _gather(self, shapes: list[int], values: list[Tensor]) -> dict[str, float] | None:
        """The means of all workers' metrics, on worker 0."""
        own = torch.stack(values).cpu() if values else torch.empty(0, dtype=torch.float64)
        if self.worker:
            if values:
                self._transport.send_note(0, ("metrics", 0), own)
            return None
        made = [own.tolist()]
        for worker in range(1, self.plan.workers):
            parts = [self.plan.evaluations[shape].stages[worker].part for shape in shapes]
            count = sum(len(part.metrics) for part in parts)
            made.append(self._numbers(worker, "metrics", count).tolist() if count else [])
        return means(self.plan, shapes, made)

    def _pass_word(self) -> None:
        """Train on when worker 0 does, so that no worker's training waits for another one's evaluation."""
        if self.worker:
            self._numbers(self.worker - 1, "shape", 1)
        self._tell(_OVER)
        self._transport.finish()

    def _numbers(self, source: int, kind: str, count: int) -> Tensor:
        self._transport.expect_note(source, (kind, 0), count)
        return self._transport.recv_note(source, (kind, 0))


class _Batch(NamedTuple):
    """What comes next: a shape, or `_OVER`; the leaves on worker 0."""

    shape: int
    leaves: tuple[Any, ...] | None
