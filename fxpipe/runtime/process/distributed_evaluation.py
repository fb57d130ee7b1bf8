"""Evaluation over worker processes: batches enter at worker 0 and go down the pipeline, several at a time.

    worker 0     reads a batch, tells the next worker its shape, runs its code
    worker k     receives the shape, passes it on, runs its code: receives, sends, keeps its metrics
    at the end   metrics go to worker 0; once it has all of them, they go from worker to worker, and all train on

A worker waits for the workers after it only until they have what it sent two batches ago, so that no worker runs far
ahead. It receives the shape of a batch, and posts that batch's receives, before it computes the batch before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.plan.spec import Plan
from fxpipe.runtime.process.goal import metrics_of
from fxpipe.runtime.wires.addresses import Addresses
from fxpipe.runtime.wires.distributed import DistTransport, Wires
from fxpipe.runtime.wires.moves import evaluation_edges, moves
from fxpipe.runtime.worker.buffers_reset import BuffersReset
from fxpipe.runtime.worker.evaluation_data import EvaluationData, Placed
from fxpipe.runtime.worker.evaluator import Evaluator, means

AHEAD = 2
"""How many batches a worker may be ahead: it has sent their values, and no worker has received them yet."""

_OVER = -1
"""Sent in place of a shape: there are no more batches."""


class DistributedEvaluation:
    """What one process does in the evaluations of a run.

    Args:
        folder: of the build.
        seed: of the run.
        data: the batches, on worker 0; None elsewhere.
        resets: the hook `reset(model)`, if there is one.

    Attributes:
        watch: measures its messages, apart from those of training.
        heard: the metrics of the newest evaluation, the same on every worker.

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
        resets: BuffersReset | None = None,
    ) -> None:
        self.plan = plan
        self.worker = wires.worker
        self._transport = DistTransport(plan, wires.worker, wires, addresses, evaluation_edges(plan), 1, AHEAD)
        self.evaluator = Evaluator(plan, wires.worker, folder, seed, self._transport)
        self.watch = self._transport.watch
        self._data = data
        self._resets = resets
        self._names = metrics_of(plan)
        self.heard: dict[str, float] = {}
        self._batches: Iterator[Placed] | None = None
        self._moves = moves(plan)
        self._fixed: dict[str, Tensor] = {}  # received once, since they never change
        self._given: set[str] = set()  # names of the messages that this worker sends only once, and has sent
        self._upcoming: _Batch | None = None

    def await_start(self) -> None:
        """Wait until worker 0 has begun; on worker 0 itself, return at once."""
        if self.worker:
            self._begin()

    def run(self, state: dict[str, Tensor]) -> dict[str, float] | None:
        """One evaluation; every worker calls it at the same point of its training.

        Args:
            state: this worker's tensors (see `Executor.state`); they must not change meanwhile.

        Returns:
            The mean of every metric on worker 0, None elsewhere.

        Raises:
            FxpipeError: making the data, or computing with them, failed; or another worker failed.
        """
        if self._upcoming is None:
            self._begin()
        state = dict(state)
        if self._resets is not None:
            self._resets(state, "evaluation")
        state |= self._exchange(state)
        shapes, weights = list[int](), list[float]()
        values: list[Tensor] = []
        upcoming, self._upcoming = self._upcoming, None
        assert upcoming is not None
        while upcoming.shape != _OVER:
            number = len(shapes)
            batch, upcoming = upcoming, self._hear(number + 1)
            self._transport.set_order(self.plan.evaluations[batch.shape].edges)
            values += self.evaluator.run(batch.shape, number, state, batch.leaves)
            shapes.append(batch.shape)
            weights.append(batch.weight)
            self._transport.done("F", number, 0)
        found = self._gather(shapes, weights, values)
        self._transport.finish()
        self._pass_word(found)
        return found

    def _begin(self) -> None:
        self._batches = None if self._data is None else self._data()
        self._transport.set_order()
        for move in self._moves:
            if move.reader == self.worker and move.name not in self._fixed:
                self._transport.expect(move.edge, 0, 0)
        self._upcoming = self._hear(0)

    def _exchange(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send this worker's tensors to the workers that read them; return the tensors of others that it reads."""
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
        """The batch that comes next; pass its shape on to the next worker, and post its receives."""
        if self._batches is not None:
            batch = next(map(_Batch._make, self._batches), _Batch(_OVER, None))
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

    def _gather(self, shapes: list[int], weights: list[float], values: list[Tensor]) -> dict[str, float] | None:
        """The means of all workers' metrics on worker 0, None elsewhere."""
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
        return means(self.plan, shapes, weights, made)

    def _pass_word(self, found: dict[str, float] | None) -> None:
        """Wait until worker 0 has all metrics, and pass them on; so no training waits for another evaluation, too."""
        if found is None:
            heard = self._numbers(self.worker - 1, "heard", len(self._names))
            self.heard = dict(zip(self._names, heard.tolist(), strict=True))
        else:
            self.heard = {name: found.get(name, math.nan) for name in self._names}
            heard = torch.tensor([found.get(name, math.nan) for name in self._names], dtype=torch.float64)
        if self.worker < self.plan.workers - 1:
            self._transport.send_note(self.worker + 1, ("heard", 0), heard)
        self._transport.finish()

    def _numbers(self, source: int, kind: str, count: int) -> Tensor:
        self._transport.expect_note(source, (kind, 0), count)
        return self._transport.recv_note(source, (kind, 0))


class _Batch(NamedTuple):
    """The batch that comes next: its shape, or `_OVER`; on worker 0 its leaves and what it counts."""

    shape: int
    leaves: tuple[Any, ...] | None
    weight: float = 0.0
