"""The evaluations of a run in one of its processes, and what its workers do about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.observe.out_folder import BEST_WEIGHTS
from fxpipe.observe.record import Record
from fxpipe.observe.run_json import RunJson
from fxpipe.observe.watch import Cause
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.consequences import Consequences
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation
from fxpipe.runtime.process.rows import WalkedRows
from fxpipe.runtime.process.world import Job
from fxpipe.runtime.wires.exchange import of_worker_0
from fxpipe.runtime.worker.captures import Due
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import FinalFiles, averages_of, weights_are_safe
from fxpipe.runtime.worker.observer import Observer
from fxpipe.runtime.worker.state_of_hooks import StateOfHooks
from fxpipe.schedule.action import Action


class BuffersKept(Observer):
    """Keeps the buffers that an evaluation of a worker during training reads: later forwards replace them."""

    def __init__(self, executor: Executor, due: Due) -> None:
        self._executor, self._due = executor, due
        self._kept: dict[int, dict[str, Tensor]] = {}  # by version, as the minibatch of that number read them
        executor.observers.append(self)

    def begins(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run; if its version is yet to come, it is evaluated later."""
        if minibatch > self._executor.store.version and self._due(minibatch):
            self._kept[minibatch] = dict(self._executor.buffers)

    def state(self, version: int) -> dict[str, Tensor]:
        """What the evaluation reads: the parameters, live, and the buffers, which are kept no longer."""
        return {**self._executor.state(version), **self._kept.pop(version, {})}


class WorkerEvaluations(Observer):
    """The evaluations of one process's workers, which have all made the same number of updates when one is due.

    Without an `evaluation` the run has nothing to evaluate.
    """

    def __init__(
        self,
        job: Job[RunOptions],
        rows: WalkedRows,
        evaluation: DistributedEvaluation | None,
        consequences: Consequences,
        hooked: StateOfHooks | None,
    ) -> None:
        self.evaluation, self.consequences = evaluation, consequences
        self._job, self._rows, self._hooked = job, rows, hooked
        self._come = 0  # rows that have reached the version that is due
        self._evaluated = rows.step
        self._record: Record | None = None
        self._newest: tuple[int, dict[str, float]] = -1, {}  # the version that was evaluated last, its metrics
        evaluated = () if evaluation is None else rows.executors
        self._buffers = [BuffersKept(executor, consequences.due) for executor in evaluated]

    def begin(self, record: Record | None) -> None:
        """Called by all workers before training begins, with worker 0's record: apply what earlier evaluations of the
        run decided."""
        self._record = record
        evaluation, ends, goes_on = self.evaluation, self.consequences, self._job.options.resume is not None
        if evaluation is None:
            ends.replay([])
            return
        ends.replay(of_worker_0([] if record is None else record.evaluations) if goes_on else [])
        if ends.missing:
            self._evaluated = self._rows.step - 1
        ends.feed(self._evaluated)
        if ends.goal is None or self._job.out is None:
            return
        lost = record is not None and record.folder is not None and ends.keep_weights(record.folder, self._write)
        if goes_on and of_worker_0(lost):
            ends.forget_best()

    def _write(self, name: str, states: Sequence[Mapping[str, Tensor]]) -> RunError | None:
        """Write a file of what all workers have evaluated; called by all."""
        assert self.evaluation is not None
        job, kept = self._job, self.consequences.weights
        out = str(job.out) if kept is None else kept.folder.own
        files = FinalFiles(out, job.plan, self._rows.executors, job.process, job.world.pulse)
        files.write(name, states)
        return files.problem

    def between(self, executors: Sequence[Executor]) -> None:
        """Evaluate, between two actions of a row, if its workers have just reached a version that is due.

        Where there are several rows, all wait for the last one.
        """
        version, job, executors = executors[0].store.version, self._job, self._rows.executors
        if self.evaluation is None or version <= self._evaluated or not self.consequences.due(version):
            return
        self._come += 1
        if self._come < len(self._rows.rows):
            job.world.turns.wait(lambda: self._evaluated >= version, lambda: f"an evaluation after {version} updates")
            return
        self._come = 0
        self._evaluated = version
        self.consequences.feed(version)
        watches = [executor.watch for executor in executors]
        flushed = job.recipe.schedule.synchronous
        for watch in watches:
            if version > self._rows.step:
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
        job.world.pulse.phase = "evaluating"
        states = [buffers.state(version) for buffers in self._buffers]
        if self._hooked is not None:
            self._hooked.into(version, states)
        metrics = self.evaluation.run(states)
        best = self._follow(version, states, metrics)
        self._newest = version, metrics
        if self._record is not None:
            self._record.evaluated(version, metrics, perf_counter() - begin, best)
        if job.options.ema is not None:
            averages = averages_of(executors) or []
            self._evaluate_averages(version, states, averages)
        job.world.pulse.phase = "training"
        for watch in watches:
            watch.close()

    def _follow(self, version: int, states: Sequence[Mapping[str, Tensor]], metrics: Mapping[str, float]) -> bool:
        """All workers have evaluated these weights: keep them if they are the best so far; return whether they are."""
        ends = self.consequences
        is_best = ends.evaluated(version, metrics)
        if is_best and ends.weights is not None and ends.best is not None:
            ends.weights.keep(states, ends.best)
        elif is_best and self._job.out is not None:
            self._write(BEST_WEIGHTS, states)
        return is_best

    def last(self, summary: RunJson | None, averages: Sequence[Mapping[str, Tensor]] | None) -> None:
        """Evaluate the trained weights, which have been written, and their averages, if there are any, for worker 0's
        summary."""
        record, out, total = self._record, self._job.out, self.consequences.end
        if self.evaluation is None:
            return
        begin = perf_counter()
        self._job.world.pulse.phase = "evaluating"
        (version, metrics), best = self._newest, False
        if version < total:  # else this evaluation has ended the run
            states = [buffers.state(total) for buffers in self._buffers]
            with weights_are_safe(out):
                metrics = self.evaluation.run(states)
            best = self._follow(total, states, metrics)
        if record is not None and summary is not None:
            self.consequences.add_to(summary)
            record.evaluated(total, metrics, perf_counter() - begin, best)
            summary.evaluated(metrics)
        if averages is not None:
            with weights_are_safe(out):
                states = [buffers.state(total) for buffers in self._buffers]
                metrics = self._evaluate_averages(total, states, averages)
            if summary is not None:
                summary.averages_evaluated(metrics)

    def _evaluate_averages(
        self, version: int, states: Sequence[Mapping[str, Tensor]], averages: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, float]:
        """The same with averages in place of the weights that are averaged."""
        assert self.evaluation is not None
        begin = perf_counter()
        metrics = self.evaluation.run([{**state, **mean} for state, mean in zip(states, averages, strict=True)])
        if self._record is not None:
            self._record.averages_evaluated(version, metrics, perf_counter() - begin)
        return metrics
