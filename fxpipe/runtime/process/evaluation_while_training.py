"""The evaluations of a run in one of its processes, and what its workers do about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.observe.pulse import Pulse
from fxpipe.observe.record import BEST_WEIGHTS, Record
from fxpipe.observe.watch import Cause
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.best_weights import BestWeights
from fxpipe.runtime.process.consequences import Consequences
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation
from fxpipe.runtime.process.run_summary import averages_evaluated, evaluated_last, write_run
from fxpipe.runtime.wires.group import peers
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import SHORT_PAUSES, DistributedFinalFiles, weights_are_safe
from fxpipe.schedule.action import Action


class WorkerEvaluations:
    """Those of the workers of one process, all of which have made as many updates whenever something is due.

    Args:
        evaluation: what evaluates; None if the run has nothing to evaluate.
        step: the run's first.
    """

    def __init__(
        self,
        options: RunOptions,
        recipe: Recipe,
        executors: Sequence[Executor],
        rank: int,
        evaluation: DistributedEvaluation | None,
        consequences: Consequences,
        pulse: Pulse,
        step: int,
    ) -> None:
        self.evaluation, self.consequences = evaluation, consequences
        self._options, self._recipe, self._executors, self._rank, self._pulse = options, recipe, executors, rank, pulse
        self._evaluated = self._step = step
        self._record: Record | None = None
        self._keeps = False
        self._best: BestWeights | None = None  # on worker 0
        if evaluation is not None:
            for executor in executors:
                executor.evaluates = consequences.due

    def begin(self, record: Record | None, goes_on: bool, earlier: Path | None) -> None:
        """Called by all workers before training begins: what earlier evaluations of the run have led to.

        Args:
            record: on worker 0.
            goes_on: after an interruption.
            earlier: the output folder of the interrupted run, if it may be another one.
        """
        self._record = record
        rows: list[Any] = [[]]
        if goes_on and self.evaluation is not None:
            if record is not None:
                rows = [record.evaluations]
            with peers(self._rank):
                dist.broadcast_object_list(rows, 0)
        self.consequences.replay(rows[0])
        if self.evaluation is not None and self.consequences.missing:
            self._evaluated = self._step - 1
        goal, out = self.consequences.goal, self._options.out
        if goal is None or out is None or self.evaluation is None:
            return
        self._keeps = True
        missing = [False]
        if record is not None:
            best, plan = self.consequences.best, self.evaluation.plan
            self._best = BestWeights(out, self._write, goal, plan.digest, best, earlier if goes_on else None)
            missing = [best is not None and self._best.held is None]
        if goes_on:
            with peers(self._rank):
                dist.broadcast_object_list(missing, 0)
        if missing[0]:
            self.consequences.forget_best()

    def _write(self, name: str, states: Sequence[Mapping[str, Tensor]]) -> RunError | None:
        """Write a file of what all workers have evaluated; called by all."""
        assert self.evaluation is not None
        out, plan = str(self._options.out), self.evaluation.plan
        files = DistributedFinalFiles(out, plan, self._executors, self._rank, self._pulse, SHORT_PAUSES)
        files.write(name, states)
        return None if files.files is None else files.files.problem

    def if_due(self, version: int) -> None:
        """Evaluate, between two actions, if the workers here have just reached a version that is due."""
        if self.evaluation is None or version == self._evaluated or not self._executors[0].evaluates(version):
            return
        self._evaluated = version
        watches = [executor.watch for executor in self._executors]
        flushed = self._recipe.schedule.synchronous
        for watch in watches:
            if version > self._step:
                watch.at(Action("B", version - 1))
            watch.refills = not flushed
        if (before := self.evaluation.before) is not None and flushed:
            # otherwise it would wait as long for the next minibatch
            watches[0].open("wait", Cause("token", "evaluation", before))
            self.evaluation.await_start()
            watches[0].close()
        begin = perf_counter()
        for watch in watches:
            watch.open("evaluate")
        self._pulse.phase = "evaluating"
        states = [executor.state(version) for executor in self._executors]
        self.evaluation.run(states)
        metrics = self.evaluation.heard
        best = self._heard(version, metrics, states)
        self._pulse.phase = "training"
        for watch in watches:
            watch.close()
        if self._record is not None:
            self._record.evaluated(version, metrics, perf_counter() - begin, best)

    def last(self, summary: dict[str, Any] | None, averages: Sequence[Mapping[str, Tensor]] | None) -> None:
        """Evaluate the trained weights, which are written by now, and the averages of them, if there are any.

        Args:
            summary: on worker 0.
        """
        record, out, total = self._record, self._options.out, self.consequences.end
        if self.evaluation is None:
            return
        begin = perf_counter()
        self._pulse.phase = "evaluating"
        states = [executor.state(total) for executor in self._executors]
        with weights_are_safe(out):
            self.evaluation.run(states)
        metrics = self.evaluation.heard
        best = self._heard(total, metrics, states)
        if record is not None and summary is not None:
            self.consequences.tell(summary, None if self._best is None else self._best.held)
            evaluated_last(record, summary, metrics, perf_counter() - begin, best)
        if averages is not None:
            pairs = zip(self._executors, averages, strict=True)
            with weights_are_safe(out):
                self.evaluation.run([{**executor.state(total), **own} for executor, own in pairs])
            if summary is not None:
                averages_evaluated(summary, self.evaluation.heard)

    def take_place(self, summary: dict[str, Any] | None) -> None:
        """The run has trained to its end, and its weights are written.

        Args:
            summary: on worker 0.
        """
        if self._best is not None:
            self._best.take_place()
        if summary is not None and self.consequences.tells:
            self.consequences.tell(summary, None if self._best is None else self._best.held)
            write_run(summary)

    def _heard(self, version: int, metrics: dict[str, float], states: list[dict[str, Tensor]]) -> bool:
        best = self.consequences.heard(version, metrics)
        if best and self._best is not None:
            assert self.consequences.best is not None
            self._best.keep(states, self.consequences.best)
        elif best and self._keeps:
            self._write(BEST_WEIGHTS, states)
        return best
