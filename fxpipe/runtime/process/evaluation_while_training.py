"""The evaluations of a run in one of its processes, and what its workers do about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.observe.record import BEST_WEIGHTS, Record
from fxpipe.observe.watch import Cause
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.consequences import Consequences
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation
from fxpipe.runtime.process.run_summary import averages_evaluated, evaluated_last
from fxpipe.runtime.process.world import World
from fxpipe.runtime.wires.exchange import of_worker_0
from fxpipe.runtime.worker.averages import averages_of
from fxpipe.runtime.worker.captures import Due
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import SHORT_PAUSES, FinalFiles, weights_are_safe
from fxpipe.runtime.worker.observer import Observer
from fxpipe.schedule.action import Action


class BuffersKept(Observer):
    """Keeps the buffers that an evaluation during training reads: later forwards replace them."""

    def __init__(self, executor: Executor, due: Due) -> None:
        self._executor, self._due = executor, due

    def begins(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run; if its version is yet to come, it is evaluated later."""
        if minibatch > self._executor.store.version and self._due(minibatch):
            self._executor.kept[minibatch] = dict(self._executor.buffers)


class WorkerEvaluations:
    """The evaluations of one process's workers, which have all made the same number of updates when one is due.

    Args:
        rows: how many rows this process walks.
        evaluation: what evaluates; None if the run has nothing to evaluate.
        step: the run's first.
    """

    def __init__(
        self,
        options: RunOptions,
        recipe: Recipe,
        executors: Sequence[Executor],
        rows: int,
        evaluation: DistributedEvaluation | None,
        consequences: Consequences,
        world: World,
        step: int,
    ) -> None:
        self.evaluation, self.consequences = evaluation, consequences
        self._options, self._recipe, self._executors = options, recipe, executors
        self._rows, self._come = rows, 0
        self._rank, self._pulse, self._turns = world.here[0], world.pulse, world.turns
        self._evaluated = self._step = step
        self._record: Record | None = None
        self._newest: tuple[int, dict[str, float]] = -1, {}  # the version that was evaluated last, its metrics
        if evaluation is not None:
            for executor in executors:
                executor.observers.append(BuffersKept(executor, consequences.due))

    def begin(self, record: Record | None) -> None:
        """Called by all workers before training begins: apply what earlier evaluations of the run decided.

        Args:
            record: on worker 0.
        """
        self._record = record
        evaluation, ends, goes_on = self.evaluation, self.consequences, self._options.resume is not None
        if evaluation is None:
            ends.replay([])
            return
        ends.replay(of_worker_0([] if record is None else record.evaluations, self._rank) if goes_on else [])
        if ends.missing:
            self._evaluated = self._step - 1
        if ends.goal is None or self._options.out is None:
            return
        lost = record is not None and ends.keep_weights(self._write)
        if goes_on and of_worker_0(lost, self._rank):
            ends.forget_best()

    def _write(self, name: str, states: Sequence[Mapping[str, Tensor]]) -> RunError | None:
        """Write a file of what all workers have evaluated; called by all."""
        assert self.evaluation is not None
        out, plan = str(self._options.out), self.evaluation.plan
        files = FinalFiles(out, plan, self._executors, self._rank, self._pulse, SHORT_PAUSES)
        files.write(name, states)
        return files.problem

    def waits(self, minibatch: int) -> bool:
        """Whether a minibatch may begin only after an evaluation."""
        return self.evaluation is not None and self.consequences.waits(minibatch, self._evaluated)

    def if_due(self, version: int) -> None:
        """Evaluate, between two actions of a row, if its workers have just reached a version that is due.

        Where there are several rows, all wait for the last one.
        """
        if self.evaluation is None or version <= self._evaluated or not self.consequences.due(version):
            return
        self._come += 1
        if self._come < self._rows:
            self._turns.wait(lambda: self._evaluated >= version, lambda: f"an evaluation after {version} updates")
            return
        self._come = 0
        self._evaluated = version
        watches = [executor.watch for executor in self._executors]
        flushed = self._recipe.schedule.synchronous
        for watch in watches:
            if version > self._step:
                watch.at(Action("B", version - 1))
            watch.refills = not flushed
        if (before := self.evaluation.before) is not None and flushed:
            # else it would wait as long for the next minibatch
            watches[0].open("wait", Cause("token", "evaluation", before))
            self.evaluation.await_start()
            watches[0].close()
        begin = perf_counter()
        for watch in watches:
            watch.open("evaluate")
        self._pulse.phase = "evaluating"
        states = [executor.state(version) for executor in self._executors]
        self.evaluation.run(states)
        metrics, best = self.evaluation.newest, self._follow(version, states)
        self._newest = version, metrics
        if self._record is not None:
            self._record.evaluated(version, metrics, perf_counter() - begin, best)
        if self._options.ema is not None:
            begin = perf_counter()
            averages = averages_of([executor.store.averages for executor in self._executors]) or []
            self.evaluation.run([{**own, **mean} for own, mean in zip(states, averages, strict=True)])
            if self._record is not None:
                self._record.averages_evaluated(version, self.evaluation.newest, perf_counter() - begin)
        self._pulse.phase = "training"
        for watch in watches:
            watch.close()

    def _follow(self, version: int, states: Sequence[Mapping[str, Tensor]]) -> bool:
        """All workers have evaluated these weights: keep them if they are the best so far; return whether they are."""
        assert self.evaluation is not None
        ends = self.consequences
        found = ends.evaluated(version, self.evaluation.newest)
        if found and ends.weights is not None and ends.best is not None:
            ends.weights.keep(states, ends.best)
        elif found and self._options.out is not None:
            self._write(BEST_WEIGHTS, states)
        return found

    def last(self, summary: dict[str, Any] | None, averages: Sequence[Mapping[str, Tensor]] | None) -> None:
        """Evaluate the trained weights, which have been written, and their averages, if there are any.

        Args:
            summary: on worker 0.
        """
        record, out, total = self._record, self._options.out, self.consequences.end
        if self.evaluation is None:
            return
        begin = perf_counter()
        self._pulse.phase = "evaluating"
        (version, metrics), best = self._newest, False
        if version < total:  # else this evaluation has ended the run
            states = [executor.state(total) for executor in self._executors]
            with weights_are_safe(out):
                self.evaluation.run(states)
            metrics, best = self.evaluation.newest, self._follow(total, states)
        if record is not None and summary is not None:
            self.consequences.add_to(summary)
            evaluated_last(record, summary, metrics, perf_counter() - begin, best)
        if averages is not None:
            begin = perf_counter()
            pairs = zip(self._executors, averages, strict=True)
            with weights_are_safe(out):
                self.evaluation.run([{**executor.state(total), **own} for executor, own in pairs])
            if record is not None and summary is not None:
                record.averages_evaluated(total, self.evaluation.newest, perf_counter() - begin)
                averages_evaluated(summary, self.evaluation.newest)
