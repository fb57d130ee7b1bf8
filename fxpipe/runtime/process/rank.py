"""What one process of a run does, with the workers of one rank or with all of them, however it was started."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import NotFiniteError, PeerLost
from fxpipe.messages import say
from fxpipe.observe.live import Board
from fxpipe.observe.logger import LoggedRun, open_loggers
from fxpipe.observe.progress import Progress
from fxpipe.observe.rates import samples_of, work_by_shape
from fxpipe.observe.record import AVERAGED_WEIGHTS, FINAL_WEIGHTS, Record, RecordedStep
from fxpipe.observe.starting import starting_text
from fxpipe.random_state import seed_everything
from fxpipe.runtime.process.check_run import check_separate_replicas, check_unchanged, evaluates
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.collect_trace import WorkerTrace, collect_trace, compare_clocks, recorded
from fxpipe.runtime.process.consequences import Consequences, EndingRow
from fxpipe.runtime.process.device import devices_of
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation
from fxpipe.runtime.process.ends import PoliteStop, say_stopped
from fxpipe.runtime.process.evaluation_while_training import WorkerEvaluations
from fxpipe.runtime.process.membership import Agreed
from fxpipe.runtime.process.minibatch_notes import BatchesRead, ComingShapes, several_shapes
from fxpipe.runtime.process.new_shapes import NewShapes, of_run
from fxpipe.runtime.process.profiled import profiled
from fxpipe.runtime.process.resume import check_length, opened, recipe_of, restore, run_before
from fxpipe.runtime.process.rows import (
    WalkedRow,
    begin_rows,
    first_replicas,
    meet,
    open_evaluation,
    open_rows,
    shared_out,
)
from fxpipe.runtime.process.run_callbacks import RunCallbacks
from fxpipe.runtime.process.run_summary import (
    peak_row,
    say_first,
    settings_of,
    summarize_run,
    take_place,
    warn_if_edited,
    watch_peak,
    worker_row,
    write_run,
)
from fxpipe.runtime.process.training_loop import train
from fxpipe.runtime.process.what_trains import WhatTrains
from fxpipe.runtime.process.world import NotFiniteAnswers, World
from fxpipe.runtime.wires.addresses import Addresses
from fxpipe.runtime.wires.carriers import carriers_text
from fxpipe.runtime.wires.exchange import barrier, gathered
from fxpipe.runtime.wires.run_folder import ASKED, MOVE
from fxpipe.runtime.worker.averages import averages_of
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.feed import Feed, agree_epoch, agree_length
from fxpipe.runtime.worker.final_weights import FinalFiles, weights_are_safe
from fxpipe.runtime.worker.not_finite import LossCheck, NotFinite, check_weights, not_finite
from fxpipe.runtime.worker.observer import Observer
from fxpipe.stages.minibatch import ShapedMinibatches

STOPPING = 0.25
"""Seconds that worker 0 of a run that stops waits so that the others see it stop."""


class TrainingRun(Observer):
    """The part of a run that is in this process: the workers of one rank, or all of them.

    Attributes:
        begin_again: takes the number of the build under which the run goes on after a move, if no launcher starts it.
    """

    begin_again: Callable[[str], None] | None = None

    def __init__(self, agreed: Agreed, world: World, progress: Progress | None) -> None:
        options, plan, task = agreed.options, agreed.plan, agreed.task
        self.neighbours = agreed.neighbours
        self.plan, self.world, self.progress, self.pulse = plan, world, progress, world.pulse
        self.process = process = world.here[0]
        if progress is not None:
            progress.starting(lambda: starting_text(world.signs(), plan.mesh.noun))
        self.observers: list[Observer] = [self]  # of the rows here, of evaluations, of checkpoints
        self.recipe = recipe = recipe_of(plan, options)
        self.resumed = resumed = opened(options, recipe, plan, agreed.checkpoint)
        self.step = 0 if resumed is None else resumed.step
        # In the order of a local run: the data, then the user's other code.
        self.feed = Feed(task, options.seed) if plan.seat(process)[0] == 0 else None
        if self.feed is None:
            seed_everything(options.seed)
        self.total, options = agree_length(options, self.feed, process, task.callbacks.on_epoch is not None)
        self.options = options = of_run(options, plan)
        check_separate_replicas(plan, options, task)
        check_length(resumed, self.total)
        evaluating = evaluates(plan, task, options.eval_every)
        addresses = Addresses(plan, recipe.demand)
        world.open(addresses)
        folder, checkpoint = options.build, agreed.checkpoint
        self.rows = open_rows(world, plan, folder, recipe, addresses, task, options, self.step, checkpoint)
        self.executors = executors = [executor for row in self.rows for executor in row.executors]
        if not plan.sharded and not world.alone:  # else each replica has one for its own share
            for executor in executors:
                executor.store.updater.compare_replicas(executor.collective, world.device)
        self.first = first = first_replicas(self.rows)
        self.epoch = agree_epoch(executors, self.feed, process, plan.processes)
        self._shards = [] if resumed is None else restore(plan, executors, resumed)
        self.evaluation: DistributedEvaluation | None = None
        self.record: Record | None = None
        if evaluating:
            data = EvaluationData(plan, task.eval_data, options.seed, task)
            self.evaluation = open_evaluation(world, plan, folder, addresses, self.rows, options.seed, data)
        self.watches = [executor.watch for executor in executors]
        self.pulse.follow(self.watches, [] if self.evaluation is None else self.evaluation.watches)
        self.consequences = Consequences(
            *(options, plan, recipe, self.total, self.step, executors, process == 0, self.observers)
        )
        self.evaluations = WorkerEvaluations(
            options, recipe, first, len(self.rows), self.evaluation, self.consequences, world, self.step
        )
        if options.trace:
            for watch in self.watches:
                watch.record()
        exchange = world.exchange
        self.shapes = NewShapes(options.build, plan, task.step_hooks, options, world.device, exchange, self.pulse)
        several = several_shapes(plan, options)
        self.batches: BatchesRead | None = None
        minibatches: ShapedMinibatches | None = None
        if self.feed is not None:
            minibatches = ShapedMinibatches(plan, Path(options.build), executors[0].buffers, task.loss_weight)
            self.observers.append(self.feed)
            self.batches = BatchesRead(self.feed, minibatches, self.watches[0], several, self._saved_at)
        self.shapes.attach(executors, minibatches)
        self.coming: ComingShapes | None = None
        if several:
            read = None if self.batches is None else self.batches.read
            self.coming = ComingShapes(world.line, executors, lambda: self.total, read, self.shapes.prepare)
            self.observers.append(self.coming)
            for executor in executors:
                executor.shape_of = self.coming
        check_unchanged(agreed.files)
        self.stop = PoliteStop()
        self.checkpoints: Checkpoints | None = None
        if options.checkpoint_every is not None:
            self.checkpoints = Checkpoints(
                *(options, plan, recipe, options.out, executors, resumed, self._shards, exchange),
                *(lambda: self.stop.asked is not None, self.observers),
            )
            self.observers.append(self.checkpoints)
        self.callbacks: RunCallbacks | None = None
        if (hooks := task.callbacks).names:
            per_epoch, ends = self.options.steps_per_epoch, self.consequences
            self.callbacks = RunCallbacks(
                *(hooks, plan, ends, self.step, per_epoch, evaluating, options.seed, executors, world.line),
                *(self.checkpoints, self._shards[0][0].state if self._shards else None),
                WhatTrains(plan, task, executors),
            )
            self.observers.append(self.callbacks)
        self._shares: dict[int, dict[int, list[tuple[Any, ...]]]] = {}  # read, by minibatch and replica
        self._check: LossCheck | None = None

    def run(self) -> dict[str, Any] | None:
        """Run all actions, write the final weights, and evaluate them last: nothing is lost if the evaluation fails."""
        options, plan = self.options, self.plan
        first = self.first[0]
        for executor in self.first:
            warn_if_edited(*executor.stages)
        for evaluator in self.evaluation.evaluators if self.evaluation is not None else ():
            warn_if_edited(*evaluator.loaded)
        devices = devices_of(self.world.device, options.peak, self.process, plan.processes)
        if self.process == 0:
            out, settings = None if options.out is None else Path(options.out), settings_of(options, plan, self.recipe)
            settings |= {"build": options.build, "workers": plan.workers, "steps": self.total}
            self.record = Record(
                options.out,
                samples_of(plan),
                self.total,
                self.progress,
                open_loggers(options.log, LoggedRun(out, settings, self.step or None)),
                workers=plan.workers,
                continue_after=self.step or None,
                earlier=run_before(options),
                steps_per_epoch=self.epoch,
                work_of=work_by_shape(lambda: self.shapes.plan, first.shape_of, devices),
            )
            if self.progress is not None and self.world.carriers:
                say(f"messages: {'; '.join(carriers_text(self.world.carriers, most=8))}")
            say_first(self.resumed, plan, self.recipe, first, options.out, self.total, self.epoch)
        record = self.record
        self.evaluations.begin(record)
        self.ends(self.consequences.end)
        try:
            steps = range(self.step, self.total)
            shown = profiled(options, plan.workers, steps, self.world, self.watches, self.observers)
            with self.stop.listening() if self.checkpoints is not None else nullcontext(), shown as profile:
                traces = self._train()
            peak = {} if self.world.alone else peak_row(self.world.device)
            self.pulse.phase = "writing results"
            rows = self._rows(peak | profile)
            if record is not None and not options.keep_going:
                check_weights(self.total, rows)
            files = None
            if options.out is not None:
                files = FinalFiles(options.out, plan, self.first, self.process, self.pulse)
                files.write(FINAL_WEIGHTS)
            with weights_are_safe(options.out):
                averages = averages_of([executor.store.averages for executor in self.first])
            if files is not None:
                if averages is not None:
                    files.write(AVERAGED_WEIGHTS, averages)
                files.check()
                take_place(options, record, averages is not None, rows)
            summary = None
            if record is not None:
                summary = summarize_run(
                    record, options, plan, self.recipe, rows, self.world.name, torch.get_num_threads()
                )
            self.consequences.take_place(summary)
            if options.trace is not None:
                elapsed = self.watches[0].elapsed
                there = collect_trace(options.trace, self.process, plan, self.recipe, traces, elapsed)
                if summary is not None and there:
                    summary["trace"] = options.trace
                    write_run(summary)
            self.evaluations.last(summary, averages)
            self.world.end()
            if self.callbacks is not None:
                self.callbacks.over()
        except PeerLost:
            if self.checkpoints is not None and self.checkpoints.agenda.stop is not None:
                time.sleep(8 * STOPPING)  # the others have ended first: until the thread that saves knows that
            while self.stop.is_saved:
                time.sleep(STOPPING)  # that thread ends this process
            raise
        finally:
            if self.checkpoints is not None:
                self.checkpoints.abandon()  # may finish one, with the record's lines so far
            if record is not None:
                record.close()
        return summary

    def _rows(self, more: dict[str, Any]) -> list[dict[str, Any]]:
        """What each worker did, and what is known of its process."""
        plan = self.plan
        own = [worker_row(e, plan.rank_of(e.worker), e.replica, self.neighbours) | more for e in self.executors]
        found = gathered(own, self.process, plan.processes)
        return sorted((row for rows in found for row in rows), key=lambda row: (row["replica"], row["worker"]))

    def _train(self) -> dict[tuple[int, int], WorkerTrace]:
        record, plan = self.record, self.plan
        begin_rows(self.rows, self.step, self.resumed, self._shards, self.total)
        self.consequences.go_on()
        if self.feed is not None:
            self.feed.go_on(self.step, self._shards[0][0].data if self._shards else None)
        self._shards = []
        before = compare_clocks(self.options.trace, self.process, plan.processes)
        stop = self.world.not_finite(self.executors)
        barrier(self.process)
        if not self.options.keep_going:
            of_loss = [e for e in self.executors if e.worker == plan.loss_worker]
            worker = (of_loss or self.executors)[0].worker
            self._check = LossCheck(worker, partial(self._not_finite, stop))
            for executor in of_loss if self.world.device.type == "cpu" else ():
                executor.observers.append(self._check)
        watch_peak(self.world.device)
        for watch in self.watches:
            watch.begin()
        self.pulse.phase = "training"
        if record is not None:
            noun = "worker" if self.world.alone else plan.mesh.noun
            record.begin(Board(lambda: self.world.statuses(self.watches), noun))
        try:
            if self.coming is not None:
                self.coming.begin(self.step)
            self.world.turns.draws = any(executor.draws for executor in self.executors)
            self.world.turns.walk([partial(self._walk, row) for row in self.rows])
            meet(self.rows)
            if self.checkpoints is not None:
                self.checkpoints.finish()
            for watch in self.watches:
                watch.end()
        finally:
            stop.end()
        return recorded(self.executors, before, compare_clocks(self.options.trace, self.process, plan.processes))

    def _walk(self, row: WalkedRow) -> None:
        """Walk one row to the end of the run."""
        events = row.events(self.recipe, self.step, self.resumed, self.total)
        ending = EndingRow(events, lambda: self.total, self.evaluations.waits, self.recipe)
        train(
            self.plan,
            row.executors,
            row.transports,
            ending.next,
            None if row.rank or self.batches is None else partial(self._share, row),
            None if row.process or self.record is None else self._report,
            self.observers,
            ending.more,
        )

    def _saved_at(self, step: int) -> bool:
        return self.checkpoints is not None and self.checkpoints.due(step)

    def _report(self, step: RecordedStep) -> None:
        """Worker 0 has ended a minibatch."""
        assert self.record is not None
        self.record.step(step)
        if self._check is not None:
            self._check.look(step.minibatch, step.loss)

    def ends(self, total: int) -> None:
        """The run ends after this many steps, perhaps fewer than it was to have."""
        self.total = total
        if self.record is not None:
            self.record.total = total

    def _not_finite(self, stop: NotFiniteAnswers, minibatch: int, loss: float, worker: int) -> NotFiniteError:
        found = [NotFinite(**row) for rows in stop.ask() for row in rows]
        return not_finite(minibatch, loss, worker, found, self.plan.workers)

    def saves(self, step: int) -> None:
        """A checkpoint is about to be complete: sync what was logged so far, too."""
        if self.record is not None:
            self.record.sync()

    def stops(self, step: int, saved: Path | None) -> None:
        """The last checkpoint of a run that was asked to stop is over: with several processes, end this one at once."""
        self.stop.saved(step, saved)
        if self.world.alone:
            return
        assert self.world.exchange is not None
        move, _, number = (self.world.exchange.get([ASKED]) or [""])[0].partition(" ")
        again = move == MOVE and self.stop.asked is None
        if self.process == 0:
            if not again:
                say_stopped(step, saved)
            time.sleep(STOPPING)  # the others look for it
        try:
            if again and self.begin_again is not None:  # else a launcher starts it again
                self.begin_again(number)
        finally:
            self.stop.exit()

    def _share(self, row: WalkedRow, minibatch: int) -> list[tuple[Any, ...]]:
        """The microbatches of a minibatch that a replica of worker 0 computes."""
        assert self.batches is not None
        if minibatch not in self._shares:
            self._shares[minibatch] = shared_out(self.world, self.plan, self.rows, minibatch, self.batches(minibatch))
        shares = self._shares[minibatch]
        own = shares.pop(row.replica)
        if not shares:
            del self._shares[minibatch]
        return own

    def between(self, executors: Sequence[Executor]) -> None:
        """All workers of a row have made another update: do what is due, in this order.

            on_step → checkpoint → evaluation → on_eval → on_epoch

        A checkpoint is made before what follows from the evaluation of its step, so a resumed run does that again.
        Checkpoints before which nothing is decided are made without this call.
        """
        callbacks = self.callbacks
        if callbacks is not None:
            for executor in executors:
                callbacks.stepped(executor)
        decided = self.consequences.changes_rates or (callbacks is not None and callbacks.follows)
        if self.checkpoints is not None and decided:
            self.checkpoints.between(executors)
        self.evaluations.if_due(executors[0].store.version)
        if callbacks is not None:
            for executor in self.executors:  # an evaluation may have held some
                callbacks.epoch_over(executor)
        if self.world.alone:  # else the thread that saves ends the process
            self.stop.give_up_if_saved()
