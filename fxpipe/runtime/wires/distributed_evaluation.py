"""Evaluation over worker processes: batches enter at worker 0 and go down the pipeline, several at a time.

    worker 0     reads a batch, tells the next worker its shape, runs its part
    worker k     hears the shape, passes it on, runs its part: receives, sends, keeps its metrics
    at the end   metrics go to worker 0; once it has all of them, a word goes down the line, and all train on

A worker waits for nobody behind it but for what it sent two batches before, so that no worker runs far ahead. It
hears of a batch, and posts its receives, before it works on the batch before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import EdgeSpec, Plan
from fxpipe.runtime.wires.distributed import Wires, Work, evaluation_channel
from fxpipe.runtime.worker.evaluation_data import EvaluationData, Placed
from fxpipe.runtime.worker.evaluator import Evaluator, count_of, means, moves

AHEAD = 2
"""Batches for which a worker may have sent values that nobody has taken yet."""

_OVER = -1
"""In place of a shape: there are no more batches, or, said once more, all metrics have come."""

_MOVED = -1
"""In place of a batch's number: tensors that are moved before the first batch."""

Pending = tuple[Work, Tensor]


class DistributedEvaluation:
    """One process's end of a run's evaluations.

    Args:
        first_tag: gloo's tags from here on are free.
        data: the batches, on worker 0 alone.
    """

    def __init__(
        self, plan: Plan, evaluator: Evaluator, wires: Wires, first_tag: int, data: EvaluationData | None
    ) -> None:
        self.plan = plan
        self.worker = evaluator.worker
        self.evaluator = evaluator
        self.wires = wires
        self._data = data
        self._batches: Iterator[Placed] | None = None
        self._last = plan.workers - 1
        self._headers, self._metrics, self._moved = first_tag, first_tag + 1, first_tag + 2
        edges = [edge for spec in plan.evaluations for edge in spec.edges]
        self._tags = {edge.name: first_tag + 3 + i for i, edge in enumerate(edges)}
        own = [edge for edge in edges if self.worker in (edge.src, edge.dst)]
        self._layouts = {edge.name: Layout(edge.tensor, edge.name) for edge in own}
        self._moves = moves(plan)
        self._fixed: dict[str, Tensor] = {}  # moved once and for all
        self._given: set[tuple[str, int]] = set()  # likewise, of this worker's own: by name and reader
        self._sent: deque[tuple[int, Pending]] = deque()
        self._posted: dict[tuple[str, int], Pending] = {}
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
            batch, upcoming = upcoming, self._hear(len(shapes) + 1)
            comm = _Comm(self, batch.shape, len(shapes))
            values += self.evaluator.run(batch.shape, len(shapes), state, batch.leaves, comm)
            shapes.append(batch.shape)
            self._reap(len(shapes) - AHEAD)
        found = self._gather(shapes, values)
        self._reap(len(shapes) + 1)
        self._pass_word()
        return found

    def receive(self, edge: EdgeSpec, number: int) -> Tensor:
        """The value of an edge for a batch."""
        return self._received(edge.name, number, self._layouts[edge.name])

    def send(self, edge: EdgeSpec, number: int, value: Tensor) -> None:
        """Hand a batch's value over; it must not change afterwards."""
        layout = self._layouts[edge.name]
        channel = evaluation_channel(edge.src, edge.dst)
        pending = self.wires.isend(layout.flat(layout(value)), edge.dst, channel, self._tags[edge.name])
        self._sent.append((number, pending))

    def _begin(self) -> None:
        self._batches = None if self._data is None else self._data()
        for move in self._moves:
            if move.reader == self.worker and move.name not in self._fixed:
                layout = Layout(move.spec, move.name)
                channel = evaluation_channel(move.source, move.reader)
                pending = self.wires.irecv(layout.count, layout.dtype, move.source, channel, self._moved)
                self._posted[move.name, _MOVED] = pending
        self._upcoming = self._hear(0)

    def _exchange(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send what others read of this worker's tensors; what it reads of theirs."""
        for move in self._moves:
            if move.source == self.worker and (move.name, move.reader) not in self._given:
                layout = Layout(move.spec, move.name)
                channel = evaluation_channel(move.source, move.reader)
                flat = layout.flat(layout(state[move.name]))
                self._sent.append((_MOVED, self.wires.isend(flat, move.reader, channel, self._moved)))
                if move.once:
                    self._given.add((move.name, move.reader))
        found = dict(self._fixed)
        for move in self._moves:
            if move.reader == self.worker and move.name not in self._fixed:
                found[move.name] = self._received(move.name, _MOVED, Layout(move.spec, move.name))
                if move.once:
                    self._fixed[move.name] = found[move.name]
        return found

    def _hear(self, number: int) -> _Batch:
        """What batch comes next; the next worker is told, and this batch's receives are posted."""
        if self._batches is not None:
            batch = _Batch(*next(self._batches, (_OVER, None)))
        else:
            batch = _Batch(int(self._numbers(self.worker - 1, 1, torch.int64, self._headers)[0]), None)
        self._tell(batch.shape, number - 1)  # it is told while the batch before is worked on
        if batch.shape != _OVER:
            for edge in self.plan.evaluations[batch.shape].edges:
                if edge.dst == self.worker:
                    layout, tag = self._layouts[edge.name], self._tags[edge.name]
                    channel = evaluation_channel(edge.src, edge.dst)
                    pending = self.wires.irecv(layout.count, layout.dtype, edge.src, channel, tag)
                    self._posted[edge.name, number] = pending
        return batch

    def _tell(self, shape: int, number: int) -> None:
        if self.worker < self._last:
            header = torch.tensor([shape])
            self._sent.append((number, self.wires.isend_numbers(header, self.worker + 1, self._headers)))

    def _gather(self, shapes: list[int], values: list[Tensor]) -> dict[str, float] | None:
        """All workers' metrics, on worker 0."""
        own = torch.stack(values).cpu() if values else torch.empty(0, dtype=torch.float64)
        if self.worker:
            if values:
                self._sent.append((len(shapes), self.wires.isend_numbers(own, 0, self._metrics)))
            return None
        made = [own.tolist()]
        for worker in range(1, self.plan.workers):
            count = count_of(self.plan, worker, shapes)
            made.append(self._numbers(worker, count, torch.float64, self._metrics).tolist() if count else [])
        return means(self.plan, shapes, made)

    def _pass_word(self) -> None:
        """Train on when worker 0 does, so that no worker's training waits for another one's evaluation."""
        if self.worker:
            self._numbers(self.worker - 1, 1, torch.int64, self._headers)
        self._tell(_OVER, 0)
        self._reap(1)

    def _numbers(self, source: int, count: int, dtype: torch.dtype, tag: int) -> Tensor:
        pending, numbers = self.wires.irecv_numbers(count, dtype, source, tag)
        self.wires.finished(pending)
        return numbers

    def _received(self, name: str, number: int, layout: Layout) -> Tensor:
        pending = self._posted.pop((name, number))
        self.wires.finished(pending)
        return self.wires.received(pending).as_strided(layout.shape, layout.stride)

    def _reap(self, before: int) -> None:
        """Wait until all that was sent for batches before this one has been received."""
        while self._sent and self._sent[0][0] < before:
            self.wires.finished(self._sent.popleft()[1])


class _Batch(NamedTuple):
    """What comes next: a shape, or `_OVER`; the leaves on worker 0."""

    shape: int
    leaves: tuple[Any, ...] | None


class _Comm:
    """What one batch's code sends and receives with."""

    def __init__(self, evaluation: DistributedEvaluation, shape: int, number: int) -> None:
        self._evaluation = evaluation
        self._number = number
        worker, edges = evaluation.worker, evaluation.plan.evaluations[shape].edges
        self._edges = {edge.name: edge for edge in edges if worker in (edge.src, edge.dst)}
        self._due = [edge.name for edge in edges if edge.src == worker]

    def recv(self, name: str) -> Tensor:
        return self._evaluation.receive(self._edges[name], self._number)

    def send(self, name: str, value: Tensor) -> None:
        edge, worker = self._edges[name], self._evaluation.worker
        due = next(other for other in self._due if self._edges[other].dst == edge.dst)
        if self._evaluation.wires.ordered and name != due:
            raise RunError(
                f"worker {worker} sends {name} where {due} is due",
                hint="over NCCL, an edited evaluation must keep the order of its sends",
            )
        self._due.remove(name)
        self._evaluation.send(edge, self._number, value)
