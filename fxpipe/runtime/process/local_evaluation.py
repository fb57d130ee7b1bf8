"""Evaluation with all workers in one process, in turn: the same bits as with one process for each worker.

Of replicas, which have the same weights, the first evaluates all batches: in one process, sharing saves no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from torch import Tensor

from fxpipe.observe.record import OnEvaluation
from fxpipe.plan.spec import Plan
from fxpipe.runtime.wires.mailbox import LocalTransport, Mailbox
from fxpipe.runtime.wires.moves import evaluation_edges, moves
from fxpipe.runtime.worker.evaluation import EvaluationData, Evaluator, means
from fxpipe.runtime.worker.executor import Executor

Follow = Callable[[int, dict[str, float], list[dict[str, Tensor]]], object]


class LocalEvaluation:
    """Evaluates the weights that a pipeline's workers hold: for every batch, one worker after the other.

    Args:
        executors: of the workers whose weights it evaluates.
        every: of these and of other replicas of them: it evaluates once all have reached a version.

    Attributes:
        evaluated: the newest version that was due and is evaluated.
        follow: called after each evaluation while training, with its version, metrics, and tensors of each worker.

    Raises:
        BuildError: as `Evaluator`.
    """

    def __init__(
        self,
        plan: Plan,
        folder: str | Path,
        seed: int,
        executors: Sequence[Executor],
        every: Sequence[Executor] = (),
    ) -> None:
        self.plan = plan
        self._executors, self._every = executors, every or executors
        mailbox = Mailbox(evaluation_edges(plan))
        self.evaluators = [
            Evaluator(plan, worker, folder, seed, LocalTransport(mailbox, worker)) for worker in range(plan.workers)
        ]
        self._moves = moves(plan)
        self._while_training: tuple[EvaluationData, OnEvaluation] | None = None
        self.evaluated = 0
        self.follow: Follow = lambda version, metrics, states: None
        self._passed: dict[tuple[int, int], dict[str, Tensor]] = {}

    def run(
        self,
        data: EvaluationData,
        version: int,
        states: Sequence[dict[str, Tensor]] | None = None,
    ) -> dict[str, float]:
        """The mean of every metric after `version` updates, all of which every worker has made.

        Args:
            states: the tensors of each worker; by default those that it has then.

        Raises:
            FxpipeError: making the data, or computing with them, failed.
        """
        held = [dict(state) for state in (self.states(version) if states is None else states)]
        for executor, own in zip(self._executors, held, strict=True):
            if executor.resets is not None:
                executor.resets(own, "evaluation")
        begun = [dict(own) for own in held]
        for move in self._moves:
            held[move.reader][move.name] = begun[move.source][move.name]
        shapes, weights = list[int](), list[float]()
        values: list[list[float]] = [[] for _ in held]
        for number, batch in enumerate(data()):
            for worker, evaluator in enumerate(self.evaluators):
                found = evaluator.run(batch.shape, number, held[worker], None if worker else batch.leaves)
                values[worker] += [float(value) for value in found]
            shapes.append(batch.shape)
            weights.append(batch.weight)
        return means(self.plan, shapes, weights, values)

    def while_training(self, due: Callable[[int], bool], data: EvaluationData, report: OnEvaluation) -> None:
        """From now on, evaluate whenever `due` says so of the number of updates, and `report` the metrics.

        Some workers may be ahead by then: their weights of that version are kept until the last worker has reached it.
        """
        self._while_training = (data, report)
        for executor in self._executors:
            executor.evaluates = due

    def before(self, worker: int) -> None:
        """Before an update: copy the weights that it changes, if they have yet to be evaluated."""
        executor = self._executors[worker]
        version = executor.store.version
        if version > self.evaluated and executor.evaluates(version):
            trained = executor.store.trained
            state = executor.state(version)
            self._passed[worker, version] = {n: t.clone() if n in trained else t for n, t in state.items()}

    def after(self) -> None:
        """After an action: evaluate if all workers have reached a version that is due."""
        version = min(executor.store.version for executor in self._every)
        if self._while_training is None or version <= self.evaluated or not self._executors[0].evaluates(version):
            return
        self.evaluated = version
        data, report = self._while_training
        for executor in self._executors:
            executor.watch.open("evaluate")
        begin = perf_counter()
        states = self.states(version)
        metrics = self.run(data, version, states)
        self.follow(version, metrics, states)
        for executor in self._executors:
            executor.watch.close()
        report(version, metrics, perf_counter() - begin)

    def awaits(self, executor: Executor) -> bool:
        """Whether a worker has reached a version that has yet to be evaluated."""
        version, due = executor.store.version, self._executors[executor.worker].evaluates
        return self._while_training is not None and version > self.evaluated and due(version)

    def states(self, version: int) -> list[dict[str, Tensor]]:
        """The tensors of each worker after so many updates; may be asked for once."""
        passed = [self._passed.pop((executor.worker, version), None) for executor in self._executors]
        pairs = zip(passed, self._executors, strict=True)
        return [executor.state(version) if state is None else state for state, executor in pairs]
