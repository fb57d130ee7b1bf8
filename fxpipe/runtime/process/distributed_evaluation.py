"""Evaluation over the workers of a run: batches enter at worker 0 and go down the pipeline, several at a time.

    worker 0     reads a batch, sends the next process its shape, runs its code
    worker k     receives the shape, says so, passes it on, runs its code: receives, sends, keeps its metrics
    at the end   metrics go to worker 0; once it has all of them, it sends them to all processes, and all train on

Replicas of the pipeline share the batches: replica j of R evaluates batch b if b mod R is j. Each replica of worker 0
reads all batches, and receives the metrics of its share from the workers of its own pipeline. Then the replicas
gather these numbers: the metrics are added up as without replicas, in the order of the batches.

A process goes on to a batch only when the next one has the shape of the batch two before, so no worker runs far ahead,
over wires without a limit, too. It receives a batch's shape, and posts that batch's receives, before it computes the
previous batch.

A process walks a row of forwards, as in training it walks a schedule's row of forwards and backwards. Worker k computes
a batch k − j turns after worker j: what it receives was sent a turn ago, and all processes compute at the same time.
With workers 0 and 2 in one process, and 1 and 3 in another:

    rank 0:  0·b0      0·b1      0·b2 2·b0  0·b3 2·b1
    rank 1:  ..        1·b0      1·b1       1·b2 3·b0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.device_copies import widest
from fxpipe.observe.watch import Watch
from fxpipe.plan.plan import Plan
from fxpipe.runtime.process.best_weights import metrics_of
from fxpipe.runtime.process.training_loop import posted
from fxpipe.runtime.wires.addresses import ProcessLine, moves
from fxpipe.runtime.wires.collective import Collective, check_read_alike
from fxpipe.runtime.wires.exchange import of_worker_0
from fxpipe.runtime.wires.wired import WiredTransport
from fxpipe.runtime.worker.evaluation import NO_NUMBERS, EvaluationData, Evaluator, Placed, whole_metrics
from fxpipe.runtime.worker.executor import Executor
from fxpipe.schedule.action import Action, Event

AHEAD = 2
"""How many batches a process may be ahead: those whose shapes the next process has not received."""

_OVER = -1
"""Sent in place of a shape: there are no more batches."""


class DistributedEvaluation:
    """What one process does in the evaluations of a run.

    Args:
        executors: of the workers of this process, in rising order. Where pipelines cross, only the first replicas
            evaluate, and send the others the metrics; so they do where all are in this process, since sharing would
            save no time.
        folder: of the build.
        data: the batches, where worker 0 is; None elsewhere.
        line: the processes.
        alone: there are no other processes; but this one may be among those of another pipeline.
        replicas: how many share the batches (see `sharing`).
        collective: connects worker 0, where it is, with its other replicas; None if they do not share.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        folder: str,
        data: EvaluationData | None,
        line: ProcessLine,
        alone: bool = True,
        replicas: int = 1,
        collective: Collective | None = None,
    ) -> None:
        self._first = first = executors[0]
        self.plan = plan = first.setting.plan
        self.evaluators = {each.worker: Evaluator(each, folder, AHEAD * replicas) for each in executors}
        self._transports = {worker: evaluator.transport for worker, evaluator in self.evaluators.items()}
        self._moved = _MovedTensors(plan, self._transports)
        self._data, self._line, self._alone, self._collective = data, line, alone, collective
        self._replicas, self._replica = replicas, first.replica % replicas
        if collective is not None:
            collective.watch = self._transports[0].watch
        self._coming: _ComingBatches | None = None  # of an evaluation that has begun

    @property
    def watches(self) -> list[Watch]:
        """They measure its messages, separately from those of training."""
        return [transport.watch for transport in self._transports.values()]

    @property
    def before(self) -> int | None:
        """The worker that sends this process the shapes of batches; None where worker 0 is."""
        return self._line.before

    def await_start(self) -> None:
        """Wait until worker 0 has begun; in worker 0's process, return at once."""
        if self.before is not None:
            self._coming = self._begin()

    def run(self, states: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Run one evaluation; every process calls it at the same point of its training.

        Args:
            states: the tensors of each worker here (see `Executor.state`); they must not change meanwhile.

        Returns:
            The mean of every metric, the same in every process.

        Raises:
            FxpipeError: the data or a computation failed; or another worker failed.
        """
        coming, self._coming = self._coming or self._begin(), None
        held = {worker: dict(state) for worker, state in zip(self.evaluators, states, strict=True)}
        if self._first.resets is not None:
            for state in held.values():
                self._first.resets(state, "evaluation")
        self._moved.exchange(held)
        for worker, evaluator in self.evaluators.items():
            evaluator.begin(held[worker], coming.shapes)
        row = partial(next, coming.row([*self.evaluators]), None)
        expect = lambda event: self.evaluators[event[0]].expect(event[1])  # noqa: E731
        for event in posted(row, expect, len(self.evaluators), self._first.device):
            if event is None:
                break
            worker, action = event
            self.evaluators[worker].execute(action, coming.leaves.pop(action.minibatch) if worker == 0 else None)
        if coming.shapes:
            coming.await_taken()
        metrics = self._gather(coming.read)
        for transport in self._transports.values():
            transport.finish()
        # Once worker 0 has all, so that training does not wait for another evaluation.
        return metrics if self._alone else of_worker_0(metrics)

    def _begin(self) -> _ComingBatches:
        batches = None if self._data is None else self._data(self._replica, self._replicas)
        self._moved.expect()
        return _ComingBatches(self._transports[self._line.own], self._line, batches, self._replica, self._replicas)

    def _gather(self, batches: Sequence[Placed]) -> dict[str, float]:
        """The metrics of the evaluation where worker 0 is; elsewhere send what they are made of.

        Args:
            batches: all that worker 0 has read.
        """
        if self._data is None:
            for worker, evaluator in self.evaluators.items():
                if len(evaluator.values):
                    self._transports[worker].send_note(0, ("metrics", 0), evaluator.values)
            return {}
        shares = [self._sizes(batches, replica) for replica in range(self._replicas)]
        values = torch.cat([self._values(worker, shares[self._replica]) for worker in range(self.plan.workers)])
        if self._collective is not None:
            key = ("evaluation", 0)
            self._collective.start_comparison(key, [(each.shape, each.weight, each.checksum) for each in batches])
            check_read_alike(self._collective, key, "an evaluation", "eval_data()")
            counts = [sum(share.values()) for share in shares]
            device = self.plan.device
            self._collective.start_gather(("metrics", 0), values.to(device, widest(device)), counts)
            values = self._collective.take(("metrics", 0)).cpu().double()
        sizes = {place: size for share in shares for place, size in share.items()}
        parts = dict(zip(sizes, values.split([*sizes.values()]), strict=True))
        means = whole_metrics(self.plan, batches, parts, self._data.of_all)
        return dict.fromkeys(metrics_of(self.plan), math.nan) | means

    def _sizes(self, batches: Sequence[Placed], replica: int) -> dict[tuple[int, int], int]:
        """How many numbers are computed by each worker for each batch of a replica's share, by worker and batch."""
        numbers = range(replica, len(batches), self._replicas)
        steps = {number: self.plan.evaluations[batches[number].shape] for number in numbers}
        return {(k, number): sum(steps[number].sizes(k)) for k in range(self.plan.workers) for number in numbers}

    def _values(self, worker: int, sizes: Mapping[tuple[int, int], int]) -> Tensor:
        """All that a worker of this pipeline has computed, where worker 0 is."""
        if worker in self.evaluators:
            return self.evaluators[worker].values
        count = sum(size for (computed_by, _), size in sizes.items() if computed_by == worker)
        return _received(self._transports[0], worker, "metrics", count) if count else NO_NUMBERS


class ReceivedEvaluation(DistributedEvaluation):
    """Evaluation in a process of another replica, where pipelines cross: it only receives the metrics."""

    @property
    def before(self) -> int | None:
        return None

    def run(self, states: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        return of_worker_0({})


class _ComingBatches:
    """The batches of one evaluation, whose shapes go from process to process before their values.

    Args:
        transport: of the worker that represents this process.
        batches: where worker 0 is; None elsewhere.
        replica: the place of this pipeline among the `replicas` that share the batches.

    Attributes:
        shapes: of this pipeline's share of the batches, by the batch's number in the whole evaluation.
        read: where worker 0 is, all batches so far, without their leaves.
        leaves: there, by number, those of batches that it has yet to compute.
    """

    def __init__(
        self,
        transport: WiredTransport,
        line: ProcessLine,
        batches: Iterator[Placed] | None,
        replica: int,
        replicas: int,
    ) -> None:
        self._transport, self._line, self._batches = transport, line, batches
        self._replica, self._replicas = replica, replicas
        self.shapes: dict[int, int] = {}
        self.read: list[Placed] = []
        self.leaves: dict[int, tuple[Any, ...]] = {}
        self._follows = self._receive()  # another batch

    def row(self, workers: Sequence[int]) -> Iterator[Event]:
        """What the workers here do: forwards of batches, until worker 0 has no more."""
        turn = 0
        while self._follows or turn < len(self.shapes) + workers[-1] - workers[0]:
            for worker in workers:
                place = turn - (worker - workers[0])
                if 0 <= place < len(self.shapes):
                    yield worker, Action("F", self._number(place))
            turn += 1
            if self._follows:
                self._follows = self._receive()

    def await_taken(self) -> None:
        """Wait until the next process has the shape of one more batch."""
        if self._line.after is not None:
            _received(self._transport, self._line.after, "taken", 1)

    def _number(self, place: int) -> int:
        """The number in the whole evaluation of a batch of this pipeline's share."""
        return place * self._replicas + self._replica

    def _receive(self) -> bool:
        """Receive the shape of the next batch, and pass it on to the next process; False if there is none."""
        if len(self.shapes) >= AHEAD:
            self.await_taken()
        number = self._number(len(self.shapes))
        before, after = self._line.before, self._line.after
        shape = self._next(number) if before is None else int(_received(self._transport, before, "shape", 1))
        if after is not None:
            self._transport.send_note(after, ("shape", 0), torch.tensor([shape], dtype=torch.float64))
        if shape == _OVER:
            return False
        if before is not None:
            self._transport.send_note(before, ("taken", 0), torch.zeros(1, dtype=torch.float64))
        self.shapes[number] = shape
        return True

    def _next(self, number: int) -> int:
        """Read the next batch of this pipeline's share; returns its shape."""
        assert self._batches is not None
        for batch in self._batches:
            self.read.append(batch._replace(leaves=None))
            if batch.leaves is not None:
                self.leaves[number] = batch.leaves
                return batch.shape
        return _OVER


class _MovedTensors:
    """Sends the tensors of the workers here to other workers that read them, before the batches of each evaluation.

    Those that never change go only before the first.
    """

    def __init__(self, plan: Plan, transports: Mapping[int, WiredTransport]) -> None:
        self._transports = transports
        self._moves = moves(plan)
        self._constants: dict[int, dict[str, Tensor]] = {}  # that were received, by worker

    def expect(self) -> None:
        """Post the receives."""
        for move in self._moves:
            if move.reader in self._transports:
                self._transports[move.reader].expect(move.edge, 0, 0)

    def exchange(self, held: dict[int, dict[str, Tensor]]) -> None:
        """Send tensors, and add to those of each worker here what it has received."""
        for move in self._moves:
            if move.source in held:
                self._transports[move.source].send(move.edge, 0, 0, held[move.source][move.name])
        for move in self._moves:
            if move.reader in held:
                value = self._transports[move.reader].recv(move.edge, 0, 0)
                held[move.reader][move.name] = value
                if move.once:
                    self._constants.setdefault(move.reader, {})[move.name] = value
        self._moves = [move for move in self._moves if not move.once]
        for worker, constants in self._constants.items():
            held[worker].update(constants)


def _received(transport: WiredTransport, source: int, kind: str, count: int) -> Tensor:
    """The numbers of a note from another worker."""
    transport.expect_note(source, (kind, 0), count)
    return transport.recv_note(source, (kind, 0))


def sharing(plan: Plan) -> int:
    """How many replicas of each worker, in processes of their own, share the batches of an evaluation.

    One, if a batch changes buffers that the next one reads, or if replicas have their own weights.
    """
    carries = any(stage.forward.updates for spec in plan.evaluations for stage in spec.stages)
    return 1 if carries or plan.outer is not None else plan.dp
