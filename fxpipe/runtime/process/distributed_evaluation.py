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
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.observe.watch import Watch
from fxpipe.plan.spec import Plan
from fxpipe.runtime.process.best_weights import metrics_of
from fxpipe.runtime.process.training_loop import posted
from fxpipe.runtime.wires.addresses import Addresses, ProcessLine, ReplicaSeat, evaluation_edges, moves
from fxpipe.runtime.wires.collective import Collective, check_read_alike
from fxpipe.runtime.wires.exchange import of_worker_0
from fxpipe.runtime.wires.wired import WiredTransport, Wires
from fxpipe.runtime.worker.evaluation import EvaluationData, Evaluator, Placed, whole_metrics
from fxpipe.runtime.worker.executor import Executor
from fxpipe.schedule.action import Action, Event

AHEAD = 2
"""How many batches a process may be ahead: those whose shapes the next process has not received."""

_NOTHING = torch.empty(0, dtype=torch.float64)

_OVER = -1
"""Sent in place of a shape: there are no more batches."""


class DistributedEvaluation:
    """What one process does in the evaluations of a run.

    Args:
        executors: of the workers of this process, in rising order. Where pipelines cross, only the first replicas
            evaluate, and send the others the metrics; so they do where all are in this process, since sharing would
            save no time.
        wires: of each of them.
        folder: of the build.
        seed: of the run.
        data: the batches, on worker 0; None elsewhere.
        line: the processes.
        collective: where worker 0 is, connects it with its other replicas; None without replicas.
        process: this one's number; None if there are no others.

    Attributes:
        evaluators: of its workers.
        newest: the metrics of the newest evaluation, the same in every process.

    Raises:
        BuildError: as `Evaluator`.
    """

    def __init__(
        self,
        plan: Plan,
        executors: Sequence[Executor],
        folder: str,
        seed: int,
        wires: Sequence[Wires],
        addresses: Addresses,
        data: EvaluationData | None,
        line: ProcessLine,
        collective: Collective | None = None,
        process: int | None = None,
    ) -> None:
        self.plan = plan
        first, alone = executors[0], process is None
        self._process = process
        self._hosted = [executor.worker for executor in executors]
        self._replicas = 1 if alone else sharing(plan)
        self._replica = first.replica % self._replicas
        counts = () if plan.crossing or alone else plan.replicas
        edges, ahead = evaluation_edges(plan), AHEAD * self._replicas
        self._transports = {
            worker: WiredTransport(
                plan, worker, own, addresses, edges, 1, ahead, ReplicaSeat(worker, first.replica, counts)
            )
            for worker, own in zip(self._hosted, wires, strict=True)
        }
        self._collective = collective if self._replicas > 1 else None
        self.evaluators = [
            Evaluator(plan, worker, folder, seed, transport) for worker, transport in self._transports.items()
        ]
        if self._collective is not None:
            self._collective.watch = self._transports[0].watch
        self._line, self._device = line, first.device
        self._speaks = self._transports[self._line.own]
        self._data = data
        self._resets = first.resets
        self._names = metrics_of(plan)
        self.newest: dict[str, float] = {}
        self._batches: Iterator[Placed] | None = None
        self._read: list[Placed] = []  # all batches so far, without their leaves
        self._moves = moves(plan)
        self._fixed: dict[tuple[int, str], Tensor] = {}  # tensors that never change, received once; by worker
        self._given: set[str] = set()  # names of the messages that are sent once and have been sent
        self._begun = self._more = False  # an evaluation has begun; another batch follows
        self._shapes: dict[int, int] = {}  # of this pipeline's share of the batches, by the batch's number
        self._leaves: dict[
            int, tuple[Any, ...]
        ] = {}  # where worker 0 is, the inputs of batches that it has yet to compute

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
            self._begin()

    def run(self, states: Sequence[dict[str, Tensor]]) -> dict[str, float] | None:
        """Run one evaluation; every process calls it at the same point of its training.

        Args:
            states: the tensors of each worker here (see `Executor.state`); they must not change meanwhile.

        Returns:
            The mean of every metric where worker 0 is, None elsewhere. All have it as `newest`.

        Raises:
            FxpipeError: the data or a computation failed; or another worker failed.
        """
        if not self._begun:
            self._begin()
        held = {worker: dict(state) for worker, state in zip(self._hosted, states, strict=True)}
        if self._resets is not None:
            for state in held.values():
                self._resets(state, "evaluation")
        self._exchange(held)
        evaluators = {evaluator.worker: evaluator for evaluator in self.evaluators}
        for worker, evaluator in evaluators.items():
            evaluator.begin(held[worker], self._shapes)
        row = partial(next, self._row(), None)
        expect = lambda event: evaluators[event[0]].expect(event[1])  # noqa: E731
        for event in posted(row, expect, len(evaluators), self._device):
            if event is None:
                break
            worker, action = event
            evaluators[worker].execute(action, self._leaves.pop(action.minibatch) if worker == 0 else None)
        if self._shapes:
            self._await_taken()
        self._begun = False
        found = self._gather({worker: evaluator.values for worker, evaluator in evaluators.items()})
        self._finish()
        return self._of_all(found)

    def _begin(self) -> None:
        self._batches = None if self._data is None else self._data(self._replica, self._replicas)
        self._read = []
        self._shapes.clear()
        for worker, transport in self._transports.items():
            transport.set_order()
            for move in self._moves:
                if move.reader == worker and (worker, move.name) not in self._fixed:
                    transport.expect(move.edge, 0, 0)
        self._begun, self._more = True, self._receive_shape()

    def _row(self) -> Iterator[Event]:
        """What the workers here do: forwards of batches, until worker 0 has no more."""
        first, turn = self._hosted[0], 0
        while self._more or turn < len(self._shapes) + self._hosted[-1] - first:
            for worker in self._hosted:
                place = turn - (worker - first)
                if 0 <= place < len(self._shapes):
                    yield worker, Action("F", self._number(place))
            turn += 1
            if self._more:
                self._more = self._receive_shape()

    def _exchange(self, held: dict[int, dict[str, Tensor]]) -> None:
        """Send the tensors of the workers here to the workers that read them; receive those that they read."""
        begun = {worker: dict(state) for worker, state in held.items()}
        for move in self._moves:
            if move.source in held and move.edge.name not in self._given:
                self._transports[move.source].send(move.edge, 0, 0, begun[move.source][move.name])
                if move.once:
                    self._given.add(move.edge.name)
        for move in self._moves:
            if move.reader not in held:
                continue
            key = (move.reader, move.name)
            found = self._fixed.get(key)
            if found is None:
                found = self._transports[move.reader].recv(move.edge, 0, 0)
                if move.once:
                    self._fixed[key] = found
            held[move.reader][move.name] = found

    def _number(self, place: int) -> int:
        """The number, from 0, in the whole evaluation of a batch of this pipeline's share."""
        return place * self._replicas + self._replica

    def _next(self, batches: Iterator[Placed]) -> Placed | None:
        """The next batch of this pipeline's share; None if there are no more."""
        for batch in batches:
            self._read.append(batch._replace(leaves=None))
            if batch.leaves is not None:
                return batch
        return None

    def _receive_shape(self) -> bool:
        """Receive the shape of the next batch, and pass it on to the next process; False if there is none."""
        if len(self._shapes) >= AHEAD:
            self._await_taken()
        number = self._number(len(self._shapes))
        if self._batches is None:
            assert self._line.before is not None
            shape = int(self._numbers(self._line.before, "shape", 1)[0])
        elif (batch := self._next(self._batches)) is not None:
            shape = batch.shape
            assert batch.leaves is not None
            self._leaves[number] = batch.leaves
        else:
            shape = _OVER
        if self._line.after is not None:
            self._speaks.send_note(self._line.after, ("shape", 0), torch.tensor([shape], dtype=torch.float64))
        if shape == _OVER:
            return False
        if self._line.before is not None:
            self._speaks.send_note(self._line.before, ("taken", 0), torch.zeros(1, dtype=torch.float64))
        self._shapes[number] = shape
        return True

    def _await_taken(self) -> None:
        """Wait until the next process has the shape of one more batch."""
        if self._line.after is not None:
            self._numbers(self._line.after, "taken", 1)

    def _gather(self, values: dict[int, list[Tensor]]) -> dict[str, float] | None:
        """The metrics of the evaluation where worker 0 is, None elsewhere."""
        own = {worker: torch.cat([_NOTHING, *(part.cpu() for part in found)]) for worker, found in values.items()}
        if 0 not in own:
            for worker, found in own.items():
                if len(found):
                    self._transports[worker].send_note(0, ("metrics", 0), found)
            return None
        made = []
        for worker in range(self.plan.workers):
            if worker in own:
                made.append(own[worker])
                continue
            count = sum(sum(self.plan.evaluations[shape].sizes(worker)) for shape in self._shapes.values())
            made.append(self._numbers(worker, "metrics", count) if count else _NOTHING)
        if self._collective is not None:
            made = put_together(self.plan, self._read, made, self._collective)
        assert self._data is not None
        shapes, weights = [batch.shape for batch in self._read], [batch.weight for batch in self._read]
        return whole_metrics(self.plan, shapes, weights, made, self._data.of_all)

    def _of_all(self, found: dict[str, float] | None) -> dict[str, float] | None:
        """Wait until worker 0 has all metrics; so training does not wait for another evaluation."""
        self.newest = {} if found is None else dict.fromkeys(self._names, math.nan) | found
        if self._process is not None:
            self.newest = of_worker_0(self.newest)
        return found

    def _finish(self) -> None:
        for transport in self._transports.values():
            transport.finish()

    def _numbers(self, source: int, kind: str, count: int) -> Tensor:
        self._speaks.expect_note(source, (kind, 0), count)
        return self._speaks.recv_note(source, (kind, 0))


class ReceivedEvaluation(DistributedEvaluation):
    """Evaluation in a process of another replica, where pipelines cross: it only receives the metrics."""

    @property
    def before(self) -> int | None:
        return None

    def run(self, states: Sequence[dict[str, Tensor]]) -> dict[str, float] | None:
        return self._of_all(None)


def sharing(plan: Plan) -> int:
    """How many replicas of each worker share the batches of an evaluation.

    One, if a batch changes buffers that the next one reads, or if replicas have their own weights.
    """
    carries = any(stage.forward.updates for spec in plan.evaluations for stage in spec.stages)
    return 1 if carries or plan.outer is not None else plan.dp


def put_together(plan: Plan, read: Sequence[Placed], values: Sequence[Tensor], collective: Collective) -> list[Tensor]:
    """The metrics of all batches by worker, as `whole_metrics` takes them; called by all replicas of worker 0.

    Args:
        read: all batches.
        values: the metrics that each worker of this pipeline computed, batch after batch of its share.

    Raises:
        RunError: the replicas have read different batches.
        PeerLost: another replica is gone.
    """
    collective.start_comparison(("evaluation", 0), [(batch.shape, batch.weight, batch.checksum) for batch in read])
    check_read_alike(collective, ("evaluation", 0), "an evaluation", "eval_data()")
    workers, replicas, batches = range(plan.workers), collective.replicas, range(len(read))
    shares = [[(worker, batch) for worker in workers for batch in batches[j::replicas]] for j in range(replicas)]
    sizes = {(w, b): sum(plan.evaluations[read[b].shape].sizes(w)) for share in shares for w, b in share}
    sums = [sum(sizes[place] for place in share) for share in shares]
    collective.start_gather(("metrics", 0), torch.cat(list(values)).to(plan.device), sums)
    parts = dict(zip(sizes, collective.take(("metrics", 0)).cpu().split(list(sizes.values())), strict=True))
    return [torch.cat([_NOTHING, *(parts[worker, batch] for batch in batches)]) for worker in workers]
