"""`fxpipe run --local`: the whole run in this process, with the same files and numbers as a distributed run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError, NotFiniteError, RunError
from fxpipe.observe.live import Board
from fxpipe.observe.progress import Progress, default_progress
from fxpipe.observe.record import AVERAGED_WEIGHTS, FINAL_WEIGHTS, Record, samples_by_shape, samples_of
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.check_run import (
    check_replicas_apart,
    check_run,
    check_unchanged,
    evaluates,
    files_read,
    writing,
)
from fxpipe.runtime.process.collect_trace import WorkerTrace, write_trace
from fxpipe.runtime.process.consequences import Consequences
from fxpipe.runtime.process.ends import PoliteStop
from fxpipe.runtime.process.epochs import counted, epoch_of, in_steps
from fxpipe.runtime.process.last_saved import name_checkpoint
from fxpipe.runtime.process.local import LocalPipeline
from fxpipe.runtime.process.new_shapes import of_run
from fxpipe.runtime.process.resume import resumed_options, resumed_step, run_before
from fxpipe.runtime.process.run_callbacks import RunCallbacks
from fxpipe.runtime.process.run_summary import (
    add_trace,
    averages_evaluated,
    evaluated_last,
    summarize_run,
    take_place,
    worker_row,
)
from fxpipe.runtime.process.warnings import say_first, warn_if_edited
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.feed import Feed
from fxpipe.runtime.worker.final_weights import SHORT_PAUSES, FinalFiles, held, weights_are_safe
from fxpipe.runtime.worker.not_finite import NotFinite, check_loss, check_weights, looking, not_finite
from fxpipe.schedule.action import Action
from fxpipe.task.hooks import task_of_build
from fxpipe.task.model_file import Task
from fxpipe.threads import threads


def run_local(options: RunOptions, task: Task | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Train a build with all its workers in this process; return the summary (see `summarize_run`).

    Args:
        task: the user's hooks; by default the file that options or plan name.
        progress: by default one that fits stderr, if `options.progress`.

    Raises:
        FxpipeError: any mistake that the user can fix.
    """
    with writing(options.out):
        options = resumed_options(options, options.out)
        stop = PoliteStop()
        with stop.listening() if options.checkpoint_every is not None else nullcontext():
            return _run(options, task, progress, stop)


def _run(options: RunOptions, task: Task | None, progress: Progress | None, stop: PoliteStop) -> dict[str, Any]:
    files = files_read(options)
    plan, checkpoint = check_run(options, from_file=task is None)
    task = task or task_of_build(plan, options.build, options.model_file)
    if progress is None and options.progress:
        progress = default_progress()
    evaluating = evaluates(plan, task, options.eval_every)
    with threads(options.threads, plan.processes):
        feed = Feed(task, options.seed)
        hooks = task.callbacks
        total, epoch = counted(options, feed, hooks.on_epoch is not None)
        options = of_run(in_steps(replace(options, steps_per_epoch=epoch)), plan)
        check_replicas_apart(plan, options, task)
        before = resumed_step(options, checkpoint, total)
        data = EvaluationData(plan, task.eval_data, options.seed, task.loss_weight, task) if evaluating else None
        record = Record(
            options.out,
            samples_of(plan),
            total,
            progress,
            options.tensorboard,
            workers=plan.workers,
            continue_after=before,
            earlier=run_before(options),
        )
        pipeline: LocalPipeline | None = None
        try:
            pipeline = LocalPipeline(
                options.build, task, options, out=options.out, keep_gradients=False, epoch=lambda: epoch_of(feed)
            )
            executors, shapes = pipeline.executors, pipeline.shapes
            record.steps_per_epoch = options.steps_per_epoch or feed.length

            def stopped(minibatch: int, loss: float, worker: int) -> NotFiniteError:
                return not_finite(minibatch, loss, worker, [NotFinite.of(executor) for executor in executors])

            look = check_loss(executors[plan.loss_worker], options.keep_going, stopped)
            for executor in pipeline.every if plan.outer is not None else ():
                if executor.replica and executor.worker == plan.loss_worker:  # has losses of its own
                    check_loss(executor, options.keep_going, stopped)
            pipeline.report = looking(record.step, look)
            record.scaled = executors[0].scaled_step
            record.samples_of = samples_by_shape(lambda: shapes.plan, executors[0].shape_of)
            watches = [executor.watch for executor in pipeline.every]
            for executor in executors:
                warn_if_edited(*executor.stages)
            for watch in watches if options.trace else ():
                watch.record()
            if data is not None:
                for evaluator in pipeline.evaluation.evaluators:
                    for loaded in evaluator.loaded:
                        warn_if_edited(loaded)
            ends = Consequences(options, plan, pipeline.recipe, total, pipeline.fed, pipeline.every, True)
            if hooks.names:
                pipeline.callbacks = callbacks = RunCallbacks(
                    hooks, plan, ends, pipeline.fed, options.steps_per_epoch, evaluating, options.seed, pipeline.every
                )
                pipeline.waits |= hooks.on_eval is not None
                callbacks.go_on(pipeline.checkpoints, pipeline.state_before)
            if data is not None:
                _evaluate_while_training(pipeline, options, data, record, ends)

            def end_at(total: int) -> None:
                record.total = total

            ends.on_end = end_at
            end_at(ends.end)
            check_unchanged(files)
            resumed, recipe = pipeline.resumed, pipeline.recipe
            say_first(resumed, plan, recipe, executors[0], options.out, total, record.steps_per_epoch)
            for watch in watches:
                watch.begin()
            record.begin(Board(lambda: [watch.status for watch in watches[: plan.workers]]))
            feed.go_on(pipeline.fed, pipeline.data_mark)
            if (checkpoints := pipeline.checkpoints) is not None:
                feed.marks, checkpoints.data, checkpoints.writer.logs = checkpoints.due, feed.mark, record.sync
                checkpoints.asked = lambda: stop.asked is not None
                checkpoints.writer.ended = stop.saved
            pipeline.begin()
            ends.go_on()
            if ends.missing:
                pipeline.evaluation.after()
            while (step := pipeline.fed) < ends.end:
                stop.give_up_if_saved()
                watches[0].at(Action("F", step))
                watches[0].open("data")
                batch = feed.next_batch()
                watches[0].close()
                pipeline.feed(batch)
            pipeline.flush()
            if checkpoints is not None:
                checkpoints.finish()
            for watch in watches:
                watch.end()
            rows = [worker_row(executor, plan.rank_of(executor.worker)) for executor in executors]
            if not options.keep_going:
                check_weights(ends.end, rows)
            final = None if options.out is None else FinalFiles(options.out, plan)
            if final is not None:
                final.write(FINAL_WEIGHTS, lambda t: held(executors[t.worker], t))
            with weights_are_safe(options.out):
                averages = pipeline.averages()
            if averages is not None and final is not None:
                final.write(AVERAGED_WEIGHTS, lambda t: held(executors[t.worker], t, averages[t.worker]))
            if final is not None:
                final.check()
                take_place(options, record, averages is not None)
            summary = summarize_run(record, options, plan, recipe, rows, "local", torch.get_num_threads())
            ends.take_place(summary)
            if (path := options.trace) is not None:
                traces = {(each.replica, each.worker): WorkerTrace.of(each.watch) for each in pipeline.every}
                add_trace(
                    summary,
                    path,
                    lambda: write_trace(
                        path, plan, recipe, watches[0].elapsed, lambda worker, replica: traces[replica, worker]
                    ),
                )
            if data is not None:
                begin = perf_counter()
                with weights_are_safe(options.out):
                    metrics = pipeline.evaluate(data)
                kept = ends.heard(ends.end, metrics, [executor.state(ends.end) for executor in executors])
                ends.tell(summary)
                evaluated_last(record, summary, metrics, perf_counter() - begin, kept)
                if averages is not None:
                    with weights_are_safe(options.out):
                        pairs = zip(executors, averages, strict=True)
                        states = [{**executor.state(ends.end), **own} for executor, own in pairs]
                        averages_evaluated(summary, pipeline.evaluation.run(data, ends.end, states))
            if pipeline.callbacks is not None:
                pipeline.callbacks.over()
        except FxpipeError as error:
            if pipeline is not None and pipeline.checkpoints is not None:
                pipeline.checkpoints.abandon()
            if record.own_steps:
                name_checkpoint(error, options, options.out)
            raise
        finally:
            if pipeline is not None and pipeline.checkpoints is not None:
                pipeline.checkpoints.abandon()  # which may still make one whole, with the record's lines so far
            record.close()
        return summary


def _evaluate_while_training(
    pipeline: LocalPipeline, options: RunOptions, data: EvaluationData, record: Record, ends: Consequences
) -> None:
    """From now on, evaluate when it is due, and do what follows: as `WorkerEvaluations` in one of several processes."""
    plan, evaluation, out = pipeline.plan, pipeline.evaluation, options.out
    ends.replay([] if pipeline.resumed is None else record.evaluations)
    if ends.goal is not None and out is not None:

        def write(name: str, states: Sequence[Mapping[str, Tensor]]) -> RunError | None:
            files = FinalFiles(out, plan, pauses=SHORT_PAUSES)
            files.write(name, lambda t: held(pipeline.executors[t.worker], t, states[t.worker]))
            return files.problem

        if ends.keep_weights(write, plan):
            ends.forget_best()

    def report(version: int, metrics: dict[str, float], seconds: float) -> None:
        record.evaluated(version, metrics, seconds, ends.is_best(version))

    evaluation.follow = ends.heard
    evaluation.while_training(ends.due, data, report)
    if ends.missing:
        evaluation.evaluated = pipeline.fed - 1
