"""What one process of a run does, with the workers of one rank or with all of them, however it was started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import NotFiniteError, PeerLost
from fxpipe.messages import say, warn
from fxpipe.observe.logger import LoggedRun, open_loggers
from fxpipe.observe.out_folder import AVERAGED_WEIGHTS, FINAL_WEIGHTS
from fxpipe.observe.progress import Progress, starting_text
from fxpipe.observe.rates import work_by_shape
from fxpipe.observe.record import Record
from fxpipe.observe.run_json import RunJson
from fxpipe.planner.device import Device
from fxpipe.runtime.process.check_run import check_separate_replicas, check_unchanged, evaluates
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.consequences import Consequences
from fxpipe.runtime.process.device import devices_of
from fxpipe.runtime.process.evaluation_while_training import WorkerEvaluations
from fxpipe.runtime.process.membership import Agreed
from fxpipe.runtime.process.resume import check_length, opened, run_before
from fxpipe.runtime.process.rows import WalkedRows
from fxpipe.runtime.process.run_callbacks import OnEpoch, OnStep, RunCallbacks
from fxpipe.runtime.process.run_data import RunData
from fxpipe.runtime.process.run_summary import (
    WorkerResult,
    peak_row,
    say_first,
    settings_of,
    summarize_run,
    take_place,
    warn_if_edited,
    watch_peak,
)
from fxpipe.runtime.process.steps_recorded import StepsRecorded
from fxpipe.runtime.process.stopping import MovingProcess, Stopping
from fxpipe.runtime.process.timelines import WorkerTrace, collect_trace, compare_clocks, profiled, recorded
from fxpipe.runtime.process.training_loop import Limit
from fxpipe.runtime.process.world import Job, World
from fxpipe.runtime.wires.exchange import barrier, gathered
from fxpipe.runtime.wires.processes import carriers_text
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.feed import agree_epoch
from fxpipe.runtime.worker.final_weights import FinalFiles, averages_of, weights_are_safe
from fxpipe.runtime.worker.not_finite import Inquiry, LossCheck, check_weights, not_finite
from fxpipe.runtime.worker.observer import Observer


class TrainingRun:
    """The part of a run that is in this process: the workers of one rank, or all of them.

    What follows its rows, in the order in which each learns of an event:

        recorded      reads losses that are on their way, if something follows from the step
        data          position in the data, shapes, state of hooks
        on_step
        checkpoints   before what follows from the evaluation of their step: a resumed run does that again
        callbacks     in a checkpoint: what they have decided
        evaluations   → on_eval, the best weights, an early end, learning rates
        on_epoch
        stopping      if the last checkpoint is over

    Args:
        moving: of this process, if it can begin again after a move.

    Attributes:
        recorded: its steps, in worker 0's process, while it runs and afterwards.
    """

    def __init__(
        self, agreed: Agreed, world: World, progress: Progress | None, moving: MovingProcess | None = None
    ) -> None:
        plan, task = agreed.plan, agreed.task
        self.neighbours, self.progress = agreed.neighbours, progress
        if progress is not None:
            progress.starting(lambda: starting_text(world.signs(), plan.mesh.noun))
        job = Job.of(agreed.options.build, plan, task, agreed.options, agreed.options.out, world)
        resumed = opened(agreed.options, job.recipe, plan, agreed.checkpoint)
        self.data = data = RunData(job)
        self.job = job = replace(job, options=data.options)
        options = data.options
        check_separate_replicas(plan, options, task)
        check_length(resumed, data.total)
        evaluating = evaluates(plan, task, options.eval_every)
        world.open(job.addresses)
        if data.hooked is not None:
            data.hooked.begin()
        everywhere = task.callbacks.on_step is not None
        self.rows = rows = WalkedRows(job, agreed.checkpoint, resumed, everywhere, around=data.around_optimizer)
        if not plan.sharded and not world.alone:  # else each replica has one for its own share
            for executor in rows.every:
                executor.store.updater.compare_replicas()
        self.epoch = agree_epoch(rows.every, data.feed)
        rows.restore()
        evaluation = None
        if evaluating:
            evaluation = rows.evaluation(EvaluationData(plan, task.eval_data, options.seed, task))
        watches = [executor.watch for executor in rows.every]
        world.pulse.follow(watches, [] if evaluation is None else evaluation.watches)
        for watch in watches if options.trace else ():
            watch.record()
        self.limit = Limit(data.total, data.total)
        self.observers: list[Observer] = []
        self.ends = Consequences(job, rows, self.limit, self.observers)
        self.evaluations = WorkerEvaluations(job, rows, evaluation, self.ends, data.hooked)
        self.stopping = stopping = Stopping(job, moving)
        data.attach(job, rows, self.limit, stopping.saves_at)
        check_unchanged(agreed.files)
        if options.checkpoint_every is not None:
            stopping.checkpoints = Checkpoints(job, rows, stopping.asked, self.observers, stopping.then)
        self.callbacks: RunCallbacks | None = None
        if task.callbacks.names:
            self.callbacks = RunCallbacks(job, rows, self.ends, stopping.checkpoints, data.around_callback)
        self.recorded: StepsRecorded | None = None

    def run(self) -> RunJson | None:
        """Run all actions, write the final weights, and evaluate them last: nothing is lost if the evaluation fails.

        Returns:
            The summary, in worker 0's process.
        """
        job, rows, evaluation, hooked = self.job, self.rows, self.evaluations.evaluation, self.data.hooked
        options, world, watches = job.options, job.world, [executor.watch for executor in rows.every]
        for executor in rows.executors:
            warn_if_edited(*executor.stages)
        for evaluator in evaluation.evaluators.values() if evaluation is not None else ():
            warn_if_edited(*evaluator.loaded)
        on_epoch = self._follow()
        record = None if self.recorded is None else self.recorded.record
        self.evaluations.begin(record)
        if record is not None:
            record.total = self.ends.end
        try:
            steps = range(rows.step, self.ends.end)
            shown = profiled(options, job.plan.workers, steps, world, watches, self.observers)
            requests, saves = self.stopping.requests, self.stopping.checkpoints is not None
            with requests.listening() if saves else nullcontext(), shown as profile:
                traces = self._train()
            if hooked is not None:
                hooked.over(self.ends.end, evaluation is not None)
            of_process = profile | ({} if world.alone else peak_row(world.device))
            with requests.put_off():
                summary, averages = self._write_results(of_process)
            if options.trace is not None:
                seconds = rows.every[0].watch.elapsed
                written = collect_trace(options.trace, job.process, job.plan, job.recipe, traces, seconds)
                if summary is not None and written:
                    summary.trace = options.trace
                    summary.write()
            self.evaluations.last(summary, averages)
            world.end()
            if on_epoch is not None:
                on_epoch.over()
        except PeerLost:
            self.stopping.lost_a_peer()
            raise
        finally:
            if hooked is not None:
                hooked.end()
            if self.stopping.checkpoints is not None:
                self.stopping.checkpoints.abandon()  # may finish one, with the record's lines so far
            if self.recorded is not None:
                self.recorded.close()
        return summary

    def _follow(self) -> OnEpoch | None:
        """Make what is yet missing of the observers, and put them into their order; return the one of `on_epoch`."""
        job, callbacks, hooks = self.job, self.callbacks, self.job.task.callbacks
        evaluates = self.evaluations.evaluation is not None
        if hooks.on_eval is not None and not evaluates and job.process == 0:
            warn("on_eval() will not be called: the workers have nothing to evaluate (eval_data, metrics)")
        on_step = None if callbacks is None or hooks.on_step is None else OnStep(callbacks, self.rows)
        on_epoch = None if callbacks is None or hooks.on_epoch is None else OnEpoch(callbacks, evaluates)
        devices = devices_of(job.world.device, job.options.peak, job.process)
        if job.process == 0:
            follows: list[Callable[[int], bool]] = [self.stopping.saves_at, self.ends.due]
            follows += [calls.due for calls in (on_step, on_epoch) if calls is not None]
            self.recorded = StepsRecorded(self._open_record(devices), follows)
        before = self.recorded, *self.data.observers, on_step, self.stopping.checkpoints
        after = callbacks, self.evaluations, on_epoch, self.stopping
        self.observers += [observer for observer in (*before, *after) if observer is not None]
        return on_epoch

    def _open_record(self, devices: list[Device | None]) -> Record:
        """What worker 0's process writes and shows of the run."""
        job, rows, total, first = self.job, self.rows, self.ends.end, self.rows.executors[0]
        options, plan, world = job.options, job.plan, job.world
        settings = settings_of(options, plan, job.recipe)
        settings |= {"build": options.build, "workers": plan.workers, "steps": total}
        logged = LoggedRun(None if options.out is None else Path(options.out), settings, rows.step or None)
        record = Record(
            options.out,
            work_by_shape(lambda: self.data.shapes.plan, first.shape_of, devices),
            total,
            self.progress,
            open_loggers(options.log, logged),
            workers=plan.workers,
            continue_after=rows.step or None,
            earlier=run_before(options),
            steps_per_epoch=self.epoch,
        )
        if self.progress is not None and world.carriers:
            say(f"messages: {'; '.join(carriers_text(world.carriers, most=8))}")
        say_first(rows.resumed, plan, job.recipe, first, options.out, total, self.epoch)
        return record

    def _train(self) -> dict[tuple[int, int], WorkerTrace]:
        job, rows, checkpoints = self.job, self.rows, self.stopping.checkpoints
        options, plan, world = job.options, job.plan, job.world
        mark = rows.shards[0][0].data if rows.shards else None
        report = None if self.recorded is None else self.recorded.report
        rows.begin(rows.step, self.limit, self.observers, self.data.batches, report)
        self.ends.go_on()
        self.data.go_on(rows.step, mark, rows.resumed is not None)
        before = compare_clocks(options.trace)
        inquiry = Inquiry(world.board, world.here, plan.processes, world.pulse, rows.executors)
        barrier()
        if not options.keep_going:
            self._check_losses(inquiry)
        watch_peak(world.device)
        for executor in rows.every:
            executor.watch.begin()
        world.pulse.phase = "training"
        if self.recorded is not None:
            noun, watches = "worker" if world.alone else plan.mesh.noun, [executor.watch for executor in rows.every]
            self.recorded.record.begin(lambda: world.statuses(watches), noun)
        if self.data.coming is not None:
            self.data.coming.begin(rows.step)
        rows.go()
        rows.losses.settle()
        if self.recorded is not None:
            self.recorded.read()
        rows.meet()
        if checkpoints is not None:
            checkpoints.finish()
        for executor in rows.every:
            executor.watch.end()
        return recorded(rows.every, before, compare_clocks(options.trace))

    def _check_losses(self, inquiry: Inquiry) -> None:
        """End the run at a loss that is not finite, whose error says what all workers have found."""
        rows, recorded, workers = self.rows, self.recorded, self.job.plan.workers

        def error(minibatch: int, loss: float, worker: int) -> NotFiniteError:
            if recorded is not None:
                recorded.forget()
            return not_finite(minibatch, loss, worker, inquiry.ask(), workers)

        of_loss = [executor for executor in rows.every if executor.worker == self.job.plan.loss.worker]
        check = LossCheck((of_loss or rows.every)[0].worker, error)
        for executor in of_loss if self.job.world.device.type == "cpu" else ():
            executor.observers.append(check)
        if recorded is not None:
            recorded.check = check

    def _write_results(
        self, of_process: dict[str, Any]
    ) -> tuple[RunJson | None, Sequence[Mapping[str, Tensor]] | None]:
        """Write the final weights and what is known of the run; return its summary, and the averages of weights.

        Args:
            of_process: what `run.json` has of this process for each of its workers.
        """
        job, executors, record = self.job, self.rows.executors, None if self.recorded is None else self.recorded.record
        options, plan, world = job.options, job.plan, job.world
        world.pulse.phase = "writing results"
        rows = self.rows.every
        results = [WorkerResult.of(e, plan.rank_of(e.worker), self.neighbours, of_process) for e in rows]
        results = [*chain.from_iterable(gathered(results))]
        results.sort(key=lambda result: (result.row.replica, result.row.worker))
        if record is not None and not options.keep_going:
            check_weights(self.ends.end, [result.not_finite for result in results])
        files = None
        if options.out is not None:
            files = FinalFiles(options.out, plan, executors, job.process, world.pulse)
            files.write(FINAL_WEIGHTS)
        with weights_are_safe(options.out):
            averages = averages_of(executors)
        if files is not None:
            if averages is not None:
                files.write(AVERAGED_WEIGHTS, averages)
            files.check()
            take_place(options, record, averages is not None, results)
        summary = None
        if record is not None:
            summary = summarize_run(record, options, plan, job.recipe, results, world.name, torch.get_num_threads())
            self.ends.add_to(summary)
            summary.write()
        return summary, averages
