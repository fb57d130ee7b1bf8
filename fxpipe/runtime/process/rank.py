"""What one process of a distributed run does, whoever started it: `launch` or torchrun."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.errors import NotFiniteError
from fxpipe.observe.live import Board
from fxpipe.observe.progress import Progress, default_progress
from fxpipe.observe.pulse import Pulse, Pulses
from fxpipe.observe.record import AVERAGED_WEIGHTS, FINAL_WEIGHTS, Record, samples_by_shape, samples_of
from fxpipe.random_state import seed_everything
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.agreement import Agreed
from fxpipe.runtime.process.allocator import reuse_freed_memory
from fxpipe.runtime.process.between_actions import between_actions
from fxpipe.runtime.process.check_run import check_replicas_apart, check_unchanged, evaluates
from fxpipe.runtime.process.checkpoints import Checkpoints
from fxpipe.runtime.process.collect_trace import WorkerTrace, collect_trace, compare_clocks
from fxpipe.runtime.process.consequences import Consequences, ending
from fxpipe.runtime.process.device import common_backend, own_device
from fxpipe.runtime.process.distributed_evaluation import DistributedEvaluation, HeardEvaluation
from fxpipe.runtime.process.ends import PoliteStop, process_name, say_stopped
from fxpipe.runtime.process.epochs import agree_epoch, agree_length
from fxpipe.runtime.process.evaluation_while_training import WorkerEvaluations
from fxpipe.runtime.process.membership import membership
from fxpipe.runtime.process.minibatch_notes import BatchesRead, ComingShapes, several_shapes
from fxpipe.runtime.process.new_shapes import NewShapes, of_run
from fxpipe.runtime.process.resume import (
    begin_or_go_on,
    opened,
    recipe_of,
    restore,
    resumed_step,
    run_before,
)
from fxpipe.runtime.process.run_callbacks import RunCallbacks
from fxpipe.runtime.process.run_summary import peak_row, summarize_run, take_place, watch_peak, worker_row
from fxpipe.runtime.process.together import AgreedStop, gathered
from fxpipe.runtime.process.training_loop import train
from fxpipe.runtime.process.warnings import say_first, warn_if_edited
from fxpipe.runtime.wires.addresses import Addresses, ProcessLine
from fxpipe.runtime.wires.clocks import ClockOffset
from fxpipe.runtime.wires.distributed import DistTransport
from fxpipe.runtime.wires.exchange import FolderExchange, StoreExchange
from fxpipe.runtime.wires.group import peers
from fxpipe.runtime.wires.replica_group import ReplicaProcess, replica_group
from fxpipe.runtime.wires.throttled import open_wires
from fxpipe.runtime.worker.assembly import open_worker
from fxpipe.runtime.worker.averages import averages_of
from fxpipe.runtime.worker.evaluation import EvaluationData
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.feed import Feed
from fxpipe.runtime.worker.final_weights import DistributedFinalFiles, weights_are_safe
from fxpipe.runtime.worker.not_finite import NotFinite, check_loss, check_weights, looking, not_finite
from fxpipe.schedule.action import Event
from fxpipe.stages.minibatch import ShapedMinibatches, number_of
from fxpipe.task.model_file import Task

TEXTS = "texts"
"""The folder for what the processes of a run on one machine tell each other, in that of the run."""

STOPPING = 1.0
"""Seconds that worker 0 of a run that stops leaves the others to see that it does."""


def join(
    options: RunOptions,
    task: Task | None = None,
    progress: Progress | None = None,
    pulse: Pulse | None = None,
) -> dict[str, Any] | None:
    """Run the workers of one rank of the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR,
    …), or that the caller has made.

    Args:
        pulse: this process's, if it was started by `launch`, where its launcher reads it.

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
    """The run of one rank's workers."""

    def __init__(
        self,
        agreed: Agreed,
        process: int,
        device: torch.device,
        progress: Progress | None,
        pulse: Pulse,
        pulses: Pulses,
    ) -> None:
        options, plan, task = agreed.options, agreed.plan, agreed.task
        self.options, self.plan, self.process, self.device, self.progress = options, plan, process, device, progress
        self.rank, self.replica = rank, replica = plan.seat(process)
        self.line, hosted = ProcessLine.of(plan, rank), plan.hosted(rank)
        self.pulse, self.pulses = pulse, pulses
        self.recipe = recipe = recipe_of(plan, options)
        self._own_recipe = recipe.of_worker(hosted[0])
        self.resumed = resumed = opened(options, recipe, plan, agreed.checkpoint)
        self.step = 0 if resumed is None else resumed.step
        # In the order of a local run: the data, then the rest of the user's code.
        self.feed = Feed(task, options.seed) if rank == 0 else None
        if self.feed is None:
            seed_everything(options.seed)
        self.total, options = agree_length(options, self.feed, process, task.callbacks.on_epoch is not None)
        self.options = options = of_run(options, plan)
        check_replicas_apart(plan, options, task)
        resumed_step(options, agreed.checkpoint, self.total)
        evaluating = evaluates(plan, task, options.eval_every)
        listening = plan.crossing and replica > 0
        self.backend = common_backend(device, process, plan.processes)
        addresses = Addresses(plan, recipe.demand)
        wires = open_wires(plan, options.throttle, process, self.backend, addresses.channels, device)
        group = replica_group(plan, process, self.backend)
        self.others = None
        if group is not None:
            count, name = plan.replicas_of(hosted[0]), process_name(process, plan.mesh)
            self.others = ReplicaProcess(group, replica, count, device, wires.staged, name)
        self.transports = [
            DistTransport.of_training(plan, worker, wires, addresses, self._own_recipe.schedule, replica)
            for worker in hosted
        ]
        self.executors: list[Executor] = [
            open_worker(
                plan,
                options.build,
                transport.worker,
                recipe,
                transport,
                task,
                options,
                device,
                continue_after=self.step or None,
                checkpoint=agreed.checkpoint,
                collective=None if self.others is None else self.others.of_worker(transport.worker),
            )
            for transport in self.transports
        ]
        executors = self.executors
        for executor in executors if not plan.sharded else ():  # else each has one for its own share
            executor.store.updater.compare_replicas(executor.collective, device)
        self.epoch = agree_epoch(executors, self.feed, process, plan.processes)
        self._shards = [] if resumed is None else restore(executors, resumed)
        self.evaluation: DistributedEvaluation | None = None
        self.record: Record | None = None
        if evaluating:
            data = None
            if rank == 0 and not listening:
                data = EvaluationData(plan, task.eval_data, options.seed, task.loss_weight, task)
            evaluation = HeardEvaluation if listening else DistributedEvaluation
            of_first = None if self.others is None or rank else self.others.of_worker(0)
            self.evaluation = evaluation(plan, executors, options.build, options.seed, wires, addresses, data, of_first)
        self.watches = [executor.watch for executor in executors]
        pulse.follow(self.watches, [] if self.evaluation is None else self.evaluation.watches)
        self.consequences = Consequences(options, plan, recipe, self.total, self.step, executors, process == 0)
        self.evaluations = WorkerEvaluations(
            options, recipe, executors, process, self.evaluation, self.consequences, pulse, self.step
        )
        if options.trace:
            for watch in self.watches:
                watch.record()
        with peers(process):
            exchange = StoreExchange() if options.exchange is None else FolderExchange(Path(options.exchange) / TEXTS)
        self.shapes = NewShapes(options.build, plan, task.step_hooks, options, device, exchange, pulse)
        several = several_shapes(plan, options)
        self.batches: BatchesRead | None = None
        minibatches: ShapedMinibatches | None = None
        if self.feed is not None:
            minibatches = ShapedMinibatches(plan, Path(options.build), executors[0].buffers, task.loss_weight)
            self.batches = BatchesRead(self.feed, minibatches, self.watches[0], several)
        self.shapes.attach(executors, minibatches)
        self.coming: ComingShapes | None = None
        if several:
            read = None if self.batches is None else self.batches.read
            speaks = self.transports[hosted.index(self.line.own)]
            self.coming = ComingShapes(self.line, speaks, self.total, read, self.shapes.hear)
            for executor in executors:
                executor.shape_of = self.coming
        check_unchanged(agreed.files)
        self.checkpoints: Checkpoints | None = None
        if options.checkpoint_every is not None:
            self.checkpoints = Checkpoints(
                options, plan, recipe, options.out, executors, resumed, self._shards, exchange
            )
        self.callbacks: RunCallbacks | None = None
        if (hooks := task.callbacks).names:
            per_epoch, ends = self.options.steps_per_epoch, self.consequences
            self.callbacks = RunCallbacks(
                hooks, plan, ends, self.step, per_epoch, evaluating, options.seed, executors, self.line
            )
            self.callbacks.go_on(self.checkpoints, self._shards[0][0].state if self._shards else None)
        self.stop = PoliteStop()
        if self.checkpoints is not None:
            self.checkpoints.asked = lambda: self.stop.asked is not None
            self.checkpoints.writer.ended = self._stopped
            if self.feed is not None:
                self.feed.marks, self.checkpoints.data = self.checkpoints.due, self.feed.mark

    def run(self) -> dict[str, Any] | None:
        """Run all actions, write the final weights, and evaluate them last: nothing is lost if the evaluation fails."""
        options, plan = self.options, self.plan
        first = self.executors[0]
        for executor in self.executors:
            warn_if_edited(*executor.stages)
        for evaluator in self.evaluation.evaluators if self.evaluation is not None else ():
            warn_if_edited(*evaluator.loaded)
        if self.process == 0:
            self.record = Record(
                options.out,
                samples_of(plan),
                self.total,
                self.progress,
                options.tensorboard,
                workers=plan.workers,
                continue_after=self.step or None,
                earlier=run_before(options),
                steps_per_epoch=self.epoch,
            )
            if self.checkpoints is not None:
                self.checkpoints.writer.logs = self.record.sync
            self.record.scaled = first.scaled_step
            self.record.samples_of = samples_by_shape(lambda: self.shapes.plan, first.shape_of)
            say_first(self.resumed, plan, self.recipe, first, options.out, self.total, self.epoch)
        record = self.record
        self.consequences.on_end = self._ends
        self.evaluations.begin(record)
        self._ends(self.consequences.end)
        try:
            with self.stop.listening() if self.checkpoints is not None else nullcontext():
                traces = self._train()
            peak = peak_row(self.device)
            self.pulse.phase = "writing results"
            rows = self._rows(peak)
            if record is not None and not options.keep_going:
                check_weights(self.total, rows)
            files = None
            if options.out is not None:
                files = DistributedFinalFiles(options.out, plan, self.executors, self.process, self.pulse)
                files.write(FINAL_WEIGHTS)
            with weights_are_safe(options.out):
                averages = averages_of([executor.store.averages for executor in self.executors])
            if files is not None:
                if averages is not None:
                    files.write(AVERAGED_WEIGHTS, averages)
                files.check()
                take_place(options, record, averages is not None)
            summary = None
            if record is not None:
                summary = summarize_run(record, options, plan, self.recipe, rows, self.backend, torch.get_num_threads())
            self.consequences.take_place(summary)
            if options.trace is not None:
                collect_trace(options.trace, self.process, plan, self.recipe, traces, summary, self.watches[0].elapsed)
            self.evaluations.last(summary, averages)
            if self.others is not None:
                self.others.end()
            if self.callbacks is not None:
                self.callbacks.over()
        finally:
            if self.checkpoints is not None:
                self.checkpoints.abandon()  # which may still make one whole, with the record's lines so far
            if record is not None:
                record.close()
        return summary

    def _rows(self, peak: dict[str, Any]) -> list[dict[str, Any]]:
        """What each worker did, and the most memory that its process took."""
        own = [worker_row(executor, self.rank, self.replica) | peak for executor in self.executors]
        found = gathered(own, self.process, self.plan.processes)
        return sorted((row for rows in found for row in rows), key=lambda row: (row["replica"], row["worker"]))

    def _train(self) -> list[WorkerTrace]:
        record, resumed = self.record, self.resumed
        for place, (executor, transport) in enumerate(zip(self.executors, self.transports, strict=True)):
            transport.begin(self.step)
            begin_or_go_on(executor, resumed, self._shards[place] if self._shards else [], self.total)
        self.consequences.go_on()
        if self.feed is not None:
            self.feed.go_on(self.step, self._shards[0][0].data if self._shards else None)
        self._shards = []
        before = self._clocks()
        with peers(self.process):
            stop = AgreedStop(
                self.process, self.plan.processes, lambda: [asdict(NotFinite.of(e)) for e in self.executors]
            )
            dist.barrier()
        of_loss = next((e for e in self.executors if e.worker == self.plan.loss_worker), self.executors[0])
        look = check_loss(of_loss, self.options.keep_going, lambda *loss: self._not_finite(stop, *loss))
        watch_peak(self.device)
        for watch in self.watches:
            watch.begin()
        self.pulse.phase = "training"
        if record is not None:
            record.begin(Board(lambda: [signs.status for signs in self.pulses.read()], self.plan.mesh.noun))
        try:
            row = ending(self._row(), lambda: self.total, self.recipe)
            feed = None if self.batches is None else self._share
            report = None if record is None else looking(record.step, look)
            if self.coming is not None:
                self.coming.begin(self.step)
            tell = None if self.callbacks is None else self.callbacks.tell
            between, reach = self._between, self._reach
            train(self.plan, self.executors, self.transports, row, feed, report, between, reach, tell)
            for transport in self.transports:
                transport.finish()
            for executor in self.executors:
                executor.begin_meeting()
            for executor in self.executors:
                executor.end_meeting()
            if self.checkpoints is not None:
                self.checkpoints.finish()
            for watch in self.watches:
                watch.end()
        finally:
            stop.end()
        after = self._clocks()
        return [WorkerTrace(watch.spans, before, after) for watch in self.watches]

    def _row(self) -> Iterator[Event]:
        """What this rank does until the run is to end."""
        if self.resumed is not None:
            return self.resumed.row(self._own_recipe, self.rank, self.total)
        return self._own_recipe.schedule.row_until(self.rank, self.total)

    def _ends(self, total: int) -> None:
        """The run ends after so many steps, perhaps fewer than it was to have."""
        self.total = total
        if self.coming is not None:
            self.coming.total = total
        if self.record is not None:
            self.record.total = total

    def _clocks(self) -> ClockOffset:
        return compare_clocks(self.options.trace, self.process, self.plan.processes)

    def _not_finite(self, stop: AgreedStop, minibatch: int, loss: float, worker: int) -> NotFiniteError:
        found = [NotFinite(**row) for rows in stop.ask() for row in rows]
        return not_finite(minibatch, loss, worker, found)

    def _stopped(self, step: int, saved: Path | None) -> None:
        """The last checkpoint of a run that was asked to stop is over: this process ends, whatever it is doing."""
        if self.process == 0:
            say_stopped(step, saved)
            time.sleep(STOPPING)  # the others look for it
        self.stop.exit()

    def _share(self, minibatch: int) -> list[tuple[Any, ...]]:
        """The microbatches of a minibatch that this replica of worker 0 does."""
        assert self.batches is not None
        parts, replicas = self.batches(minibatch), self.plan.replicas_of(0)
        if replicas > 1:
            self.executors[0].compare_batch(minibatch, number_of(parts))
        return parts[self.replica :: replicas]

    def _between(self, version: int) -> None:
        """Between two actions, after so many updates of each worker here."""
        between_actions(
            self.executors,
            self.executors,
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
