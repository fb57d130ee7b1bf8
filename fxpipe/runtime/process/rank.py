"""What one process of a distributed run does, whoever started it: `launch` or torchrun."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.errors import NotFiniteError
from fxpipe.observe.live import PulseBoard
from fxpipe.observe.progress import Progress, default_progress
from fxpipe.observe.pulse import Pulse, Pulses
from fxpipe.observe.record import AVERAGED_WEIGHTS, FINAL_WEIGHTS, Record, samples_by_shape, samples_of
from fxpipe.policy.recipe import choose
from fxpipe.random_state import seed_everything
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.agreed_stop import AgreedStop
from fxpipe.runtime.process.agreement import Agreed
from fxpipe.runtime.process.allocator import reuse_freed_memory
from fxpipe.runtime.process.batches_read import BatchesRead
from fxpipe.runtime.process.between_actions import between_actions
from fxpipe.runtime.process.check_run import check_unchanged
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.coming_shapes import ComingShapes, several_shapes
from fxpipe.runtime.process.consequences import Consequences
from fxpipe.runtime.process.device import common_backend, own_device
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation
from fxpipe.runtime.process.distributed_weights import DistributedFinalFiles
from fxpipe.runtime.process.early_stop import ending
from fxpipe.runtime.process.epochs import agree_epoch, agree_length
from fxpipe.runtime.process.evaluation_while_training import WorkerEvaluations
from fxpipe.runtime.process.membership import membership
from fxpipe.runtime.process.new_shapes import NewShapes, of_run
from fxpipe.runtime.process.polite_stop import PoliteStop, say_stopped
from fxpipe.runtime.process.rank_trace import collect_trace, compare_clocks
from fxpipe.runtime.process.resume import begin_or_go_on, opened, restore, resumed_step, run_before, say_resumed
from fxpipe.runtime.process.run_callbacks import RunCallbacks
from fxpipe.runtime.process.run_summary import peak_row, summarize_run, take_place, watch_peak, worker_row
from fxpipe.runtime.process.training_loop import train
from fxpipe.runtime.process.warnings import warn_if_edited, warn_of_codecs, warn_of_hurry, warn_of_staleness
from fxpipe.runtime.wires.addresses import Addresses
from fxpipe.runtime.wires.clocks import ClockOffset
from fxpipe.runtime.wires.collect_trace import WorkerTrace
from fxpipe.runtime.wires.distributed import DistTransport, Wires
from fxpipe.runtime.wires.exchange import FolderExchange, StoreExchange
from fxpipe.runtime.wires.group import peers
from fxpipe.runtime.wires.meter import meter_of_process
from fxpipe.runtime.worker.assembly import open_worker
from fxpipe.runtime.worker.averages import averages_of
from fxpipe.runtime.worker.evaluation_check import evaluates
from fxpipe.runtime.worker.evaluation_data import EvaluationData
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.feed import Feed
from fxpipe.runtime.worker.final_weights import warn_of_little_room, weights_are_safe
from fxpipe.runtime.worker.not_finite import NotFinite, check_loss, check_weights, looking, not_finite
from fxpipe.stages.minibatch import ShapedMinibatches
from fxpipe.task.hooks import TrainingTask

TEXTS = "texts"
"""The folder for what the workers of a run on one machine tell each other, in that of the run."""

STOPPING = 1.0
"""Seconds that worker 0 of a run that stops leaves the others to see that it does."""


def join(
    options: RunOptions,
    task: TrainingTask | None = None,
    progress: Progress | None = None,
    pulse: Pulse | None = None,
) -> dict[str, Any] | None:
    """Run one worker of the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, …), or that
    the caller has made.

    Args:
        pulse: this worker's, if it was started by `launch`, where its launcher reads it.

    Returns:
        The summary (see `summarize_run`) on rank 0, None elsewhere.

    Raises:
        FxpipeError: as `membership`.
    """
    reuse_freed_memory()
    with membership(options, task, pulse) as member:
        if options.progress and progress is None and member.rank == 0:
            progress = default_progress()
        agreed = member.agreed
        return RankRun(agreed, member.rank, own_device(agreed.plan.device), progress, member.pulse, member.pulses).run()


class RankRun:
    """One worker's run."""

    def __init__(
        self,
        agreed: Agreed,
        rank: int,
        device: torch.device,
        progress: Progress | None,
        pulse: Pulse,
        pulses: Pulses,
    ) -> None:
        options, plan, task = agreed.options, agreed.plan, agreed.task
        self.options, self.plan, self.rank, self.device, self.progress = options, plan, rank, device, progress
        self.pulse, self.pulses = pulse, pulses
        self.recipe = recipe = choose(plan, options.schedule, options.policy, options.sync_steps)
        self.resumed = resumed = opened(options, recipe, plan, agreed.checkpoint)
        self.step = 0 if resumed is None else resumed.step
        # In the order of a local run: the data, then the rest of the user's code.
        self.feed = Feed(task, options.seed) if rank == 0 else None
        if self.feed is None:
            seed_everything(options.seed)
        self.total, options = agree_length(options, self.feed, rank, task.callbacks.on_epoch is not None)
        self.options = options = of_run(options, plan)
        resumed_step(options, agreed.checkpoint, self.total)
        evaluating = evaluates(plan, task, options.eval_every)
        self.backend = common_backend(device, rank, plan.workers)
        addresses = Addresses(plan, recipe.demand)
        meter = meter_of_process(options.throttle, rank, plan.workers)
        wires = Wires(rank, self.backend, addresses.channels, device, meter)
        self.transport = DistTransport.of_training(plan, rank, wires, addresses, recipe.schedule)
        self.executor: Executor = open_worker(
            plan,
            options.build,
            rank,
            recipe,
            self.transport,
            task,
            options,
            device,
            out=options.out,
            continue_after=self.step or None,
            checkpoint=agreed.checkpoint,
        )
        self.epoch = agree_epoch(self.executor, self.feed, rank, plan.workers)
        self._shards = [] if resumed is None else restore([self.executor], resumed)[0]
        self.evaluation: DistributedEvaluation | None = None
        self.record: Record | None = None
        if evaluating:
            data = EvaluationData(plan, task.eval_data, options.seed, task.loss_weight, task) if rank == 0 else None
            resets = self.executor.resets
            self.evaluation = DistributedEvaluation(plan, options.build, options.seed, wires, addresses, data, resets)
            pulse.follow(self.executor.watch, self.evaluation.watch)
        else:
            pulse.follow(self.executor.watch)
        executors = [self.executor]
        self.consequences = Consequences(options, plan, recipe, self.total, self.step, executors, rank == 0)
        self.evaluations = WorkerEvaluations(
            options, recipe, self.executor, self.evaluation, self.consequences, pulse, self.step
        )
        if options.trace:
            self.executor.watch.record()
        with peers(rank):
            exchange = StoreExchange() if options.exchange is None else FolderExchange(Path(options.exchange) / TEXTS)
        self.shapes = NewShapes(options.build, plan, task.step_hooks, options, device, exchange, pulse)
        several = several_shapes(plan, options)
        self.batches: BatchesRead | None = None
        minibatches: ShapedMinibatches | None = None
        if self.feed is not None:
            minibatches = ShapedMinibatches(plan, Path(options.build), self.executor.buffers, task.loss_weight)
            self.batches = BatchesRead(self.feed, minibatches, self.executor.watch, several)
        self.shapes.attach(executors, minibatches)
        self.coming: ComingShapes | None = None
        if several:
            read = None if self.batches is None else self.batches.read
            self.coming = ComingShapes(plan, rank, self.transport, self.total, read, self.shapes.hear)
            self.executor.shape_of = self.coming
        check_unchanged(agreed.files)
        shards = [] if resumed is None else [self._shards]
        self.checkpoints = Checkpoints.of(
            options, plan, recipe, options.out, [self.executor], resumed, shards, exchange
        )
        self.callbacks: RunCallbacks | None = None
        if (hooks := task.callbacks).names:
            per_epoch, ends = self.options.steps_per_epoch, self.consequences
            self.callbacks = RunCallbacks(
                hooks, plan, ends, self.step, per_epoch, evaluating, options.seed, executors, self.transport
            )
            self.callbacks.go_on(self.checkpoints, self._shards[0].state if self._shards else None)
        self.stop = PoliteStop()
        if self.checkpoints is not None:
            self.checkpoints.asked = lambda: self.stop.asked is not None
            self.checkpoints.writer.ended = self._stopped
            if self.feed is not None:
                self.feed.marks, self.checkpoints.data = self.checkpoints.due, self.feed.mark

    def run(self) -> dict[str, Any] | None:
        """Run all actions, write the final weights, and evaluate them last: nothing is lost if the evaluation fails."""
        options, plan = self.options, self.plan
        warn_if_edited(*self.executor.stages)
        for loaded in self.evaluation.evaluator.loaded if self.evaluation is not None else ():
            warn_if_edited(loaded)
        if self.rank == 0:
            self.record = Record(
                options.out,
                samples_of(plan),
                self.total,
                self.progress,
                options.tensorboard,
                workers=plan.workers,
                before=options.sync_steps,
                continue_after=self.step or None,
                earlier=run_before(options),
                steps_per_epoch=self.epoch,
            )
            if self.checkpoints is not None:
                self.checkpoints.writer.logs = self.record.sync
            self.record.scaled = self.executor.scaled_step
            self.record.samples_of = samples_by_shape(lambda: self.shapes.plan, self.executor.shape_of)
            if self.resumed is not None:
                say_resumed(self.resumed)
            else:
                warn_of_hurry(self.executor, self.total, self.epoch)
            warn_of_staleness(self.recipe, self.executor)
            warn_of_codecs(plan)
            warn_of_little_room(options.out, plan, self.executor.store.averages is not None)
        record = self.record
        self.consequences.on_end = self._ends
        self.evaluations.begin(record, self.resumed is not None, run_before(options))
        self._ends(self.consequences.end)
        try:
            with self.stop.listening() if self.checkpoints is not None else nullcontext():
                trace = self._train()
            peak = peak_row(self.device)
            self.pulse.phase = "writing results"
            rows: list[Any] = [None] * plan.workers
            with peers(self.rank):
                dist.gather_object(worker_row(self.executor) | peak, rows if self.rank == 0 else None)
            if record is not None and not options.keep_going:
                check_weights(self.total, rows)
            files = None if options.out is None else DistributedFinalFiles(options.out, plan, self.executor, self.pulse)
            if files is not None:
                files.write(FINAL_WEIGHTS)
            with weights_are_safe(options.out):
                averages = averages_of([self.executor.store.averages])
            if files is not None:
                if averages is not None:
                    files.write(AVERAGED_WEIGHTS, averages[0])
                files.check()
                take_place(options, plan, record, [self.executor], averages is not None)
            summary = None
            if record is not None:
                summary = summarize_run(record, options, plan, self.recipe, rows, self.backend, torch.get_num_threads())
            self.evaluations.take_place(summary)
            if options.trace is not None:
                seconds = self.executor.watch.elapsed
                collect_trace(options.trace, self.rank, plan, self.recipe, trace, summary, seconds)
            self.evaluations.last(summary, None if averages is None else averages[0])
            if self.callbacks is not None:
                self.callbacks.over()
            if record is not None:
                record.end(summary)
        finally:
            if self.checkpoints is not None:
                self.checkpoints.abandon()  # which may still make one whole, with the record's lines so far
            if record is not None:
                record.close()
        return summary

    def _train(self) -> WorkerTrace:
        watch, record, resumed = self.executor.watch, self.record, self.resumed
        self.transport.begin(self.step)
        begin_or_go_on(self.executor, resumed, self._shards, self.total)
        self.consequences.go_on()
        if self.feed is not None:
            self.feed.go_on(self.step, self._shards[0].data if self._shards else None)
        self._shards = []
        before = self._clocks()
        with peers(self.rank):
            stop = AgreedStop(self.rank, self.plan.workers, lambda: asdict(NotFinite.of(self.executor)))
            dist.barrier()
        look = check_loss(self.executor, self.options.keep_going, lambda *loss: self._not_finite(stop, *loss))
        watch_peak(self.device)
        watch.begin()
        self.pulse.phase = "training"
        if record is not None:
            record.begin(PulseBoard(self.pulses))
        try:
            if resumed is None:
                actions = self.recipe.segments.until(self.recipe.schedule, self.rank, self.total)
            else:
                actions = resumed.actions(self.recipe, self.rank, self.total)
            actions = ending(actions, lambda: self.total, self.recipe)
            feed, report = (None, None) if record is None else (self.batches, looking(record.step, look))
            if self.coming is not None:
                self.coming.begin(self.step)
            tell = None if self.callbacks is None else self.callbacks.tell
            train(self.plan, self.executor, self.transport, actions, feed, report, self._between, self._reach, tell)
            self.transport.finish()
            if self.checkpoints is not None:
                self.checkpoints.finish()
            watch.end()
        finally:
            stop.end()
        return WorkerTrace(watch.spans, before, self._clocks())

    def _ends(self, total: int) -> None:
        """The run ends after so many steps, perhaps fewer than it was to have."""
        self.total = total
        if self.coming is not None:
            self.coming.total = total
        if self.record is not None:
            self.record.total = total

    def _clocks(self) -> ClockOffset:
        return compare_clocks(self.options.trace, self.rank, self.plan.workers)

    def _not_finite(self, stop: AgreedStop, minibatch: int, loss: float, worker: int) -> NotFiniteError:
        found = [NotFinite(**row) for row in stop.ask()]
        return not_finite(minibatch, loss, worker, found)

    def _stopped(self, step: int, saved: Path | None) -> None:
        """The last checkpoint of a run that was asked to stop is over: this process ends, whatever it is doing."""
        if self.rank == 0:
            say_stopped(step, saved)
            time.sleep(STOPPING)  # the others look for it
        self.stop.exit()

    def _between(self, version: int) -> None:
        """Between two actions, after so many updates."""
        between_actions(
            self.executor,
            [self.executor],
            self.callbacks,
            self.checkpoints,
            lambda: self.evaluations.if_due(version),
            self.consequences.changes_rates,
        )

    def _reach(self, minibatch: int, version: int) -> None:
        """The first forward of a minibatch is about to run."""
        if self.coming is not None:
            self.coming.reach(minibatch, version)
        if self.callbacks is not None:
            self.callbacks.begins(minibatch)
