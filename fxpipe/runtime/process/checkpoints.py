"""Saves the workers' shards during training: a thread of each process writes them, worker 0's makes the checkpoint.

every worker:  take a copy of its shard at step S │ train on
  its thread:                                    │ write the files, sync, report their digests
worker 0's:                                      │ wait for all reports, write the manifest, rename
"""

from __future__ import annotations

import json
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import compress
from typing import Any

from fxpipe.checkpoint.interval import Interval
from fxpipe.checkpoint.manifest import FileEntry
from fxpipe.checkpoint.shard import Shard, complete, replicas_that_write, write_shard
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.checkpoint.tree import said
from fxpipe.errors import CheckpointError, PeerLost
from fxpipe.messages import warn
from fxpipe.plan.spec import Plan
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.last_saved import MOST, RUNNING_ON, finish_writing, shown_alive
from fxpipe.runtime.process.minibatch_notes import AHEAD, several_shapes
from fxpipe.runtime.process.resume import Resumed, about_run
from fxpipe.runtime.wires.exchange import Exchange, StoreExchange
from fxpipe.runtime.worker.captures import Agenda, Captures
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer
from fxpipe.torch_private import HashStore

LOOK = 0.05
"""Seconds between two looks for the reports of other processes."""


class Checkpoints(Observer):
    """Makes the checkpoints that a run's options ask for, for the workers of one process, whose rows it follows.

    The first replica of a worker writes what all replicas have; each writes what it alone has.

    Args:
        out: the run's output folder.
        executors: this process's; in a run of one process without replicas that have nothing to write.
        resumed, shards: the checkpoint that the run goes on from, and what each executor has read of it.
        exchange: with the other processes of the run; None if there are none.
        asked: whether this process was asked to stop the run, after one more.
        observers: are called for each checkpoint.

    Raises:
        CheckpointError: there is no output folder for them.
    """

    def __init__(
        self,
        options: PipelineOptions,
        plan: Plan,
        recipe: Recipe,
        out: str | None,
        executors: Sequence[Executor],
        resumed: Resumed | None,
        shards: Sequence[Sequence[Shard]] = (),
        exchange: Exchange | None = None,
        asked: Callable[[], bool] = lambda: False,
        observers: Sequence[Observer] = (),
    ) -> None:
        assert options.checkpoint_every is not None
        if out is None:
            raise CheckpointError("checkpoints need an output folder", hint="give out=FOLDER for them")
        self.every = Interval.of(options.checkpoint_every)
        write = [e.replica < replicas_that_write(plan, e.worker) or exchange is not None for e in executors]
        executors, shards = list(compress(executors, write)), list(compress(shards, write))
        whole = any((executor.worker, executor.replica) == (0, 0) for executor in executors)
        shelf = Shelf.of(out)
        if whole:
            shelf.clear()
        exchange = exchange or StoreExchange(HashStore())
        self.writer = ShardWriter(
            shelf, plan, about_run(options, recipe, plan), exchange, whole, options.keep, observers
        )
        self._observers, self._store = observers, executors[0].store
        demand = self._store.demand
        reach = max(demand.reach(owner) for owner in range(plan.workers))
        ahead = reach + 1 + (AHEAD if several_shapes(plan, options) else 0)
        step = 0 if resumed is None else resumed.step
        self.agenda = Agenda(exchange, step, ahead, self.every.seconds, whole, asked)
        exact = shards[: len(executors)] if resumed is not None and resumed.exact else ()
        before = [(of_worker[0].past, of_worker[0].sent) for of_worker in exact] or [({}, {}) for _ in executors]
        self._captures = {
            (executor.worker, executor.replica): Captures(executor, self.due, past, sent)
            for executor, (past, sent) in zip(executors, before, strict=True)
        }

    def between(self, executors: Sequence[Executor]) -> None:
        """Write the shards of workers that have reached a step that is due."""
        for executor in executors:
            captures = self._captures.get((executor.worker, executor.replica))
            if captures is None or (shard := captures.take()) is None:
                continue
            for observer in () if executor.replica else self._observers:
                observer.cut(executor.worker, shard)
            executor.watch.open("save")
            self.writer.put(executor, shard, last=shard.step == self.agenda.stop)
            executor.watch.close()

    def add(self, step: int) -> None:
        """Make a checkpoint at a step, which is not before `Consequences.earliest`."""
        self.agenda.add(step)

    def finish(self) -> None:
        """The run is over: wait until all its checkpoints are on the disk."""
        watches = [captures.executor.watch for captures in self._captures.values()]
        for watch in watches:
            watch.open("save")
        self.writer.finish()
        for watch in watches:
            watch.close()

    def abandon(self) -> None:
        """The run is over, or an error ends it: first write checkpoints that all workers have copied."""
        error = sys.exception()
        if isinstance(error, Exception) and not self.writer.abandoned:
            most = RUNNING_ON if isinstance(error, PeerLost) else MOST
            finish_writing(self.writer.shelf.folder.parent, most, self.writer.writes)
        self.writer.abandon()

    def begins(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run in a row; the first worker's is the first of all."""
        version, outer = self._store.version, self._store.outer
        self.agenda.begin(minibatch, version if outer is None else outer.made_by_all(version))

    def due(self, step: int) -> bool:
        """Whether there is a checkpoint at a step."""
        return self.every.due(step) or step in self.agenda


class ShardWriter:
    """Writes the shards of this process's workers, and on worker 0 makes checkpoints of all shards.

    A checkpoint that cannot be written is given up with a warning; training goes on, earlier checkpoints stay.

    Args:
        about: what the manifest says of the run: `plan`, `run`, `versions`.
        whole: whether this process has worker 0.
        keep: how many checkpoints stay.
        observers: are called for each checkpoint.

    Attributes:
        whole: as given.
    """

    def __init__(
        self,
        shelf: Shelf,
        plan: Plan,
        about: Mapping[str, Any],
        exchange: Exchange,
        whole: bool,
        keep: int,
        observers: Sequence[Observer],
    ) -> None:
        self.shelf, self.plan, self.about, self.exchange = shelf, plan, about, exchange
        self.keep, self._observers = keep, observers
        self._last: int | None = None
        self._anchored = False  # the names of the folders of checkpoints are synced to the disk
        self.whole = whole
        workers = range(plan.workers)
        self._written = [(worker, r) for worker in workers for r in range(replicas_that_write(plan, worker))]
        self._shards: queue.Queue[tuple[int, int, Shard] | None] = queue.Queue(maxsize=len(self._written))
        self._waiting: dict[int, int] = {}  # steps some of whose reports are missing, and their start
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def put(self, executor: Executor, shard: Shard, last: bool = False) -> None:
        """Have a worker's shard written; wait while earlier ones are being written. After the last the run stops."""
        if last:
            self._last = shard.step
        if (executor.worker, executor.replica) in self._written:
            self._shards.put((executor.worker, executor.replica, shard))

    def finish(self) -> None:
        """Wait until everything is on the disk; with worker 0 here, the shards of other processes, too."""
        self._shards.put(None)
        self._thread.join()

    def writes(self) -> bool:
        """Whether shards are yet to be written."""
        return self._thread.is_alive() and self._shards.unfinished_tasks > 0

    @property
    def abandoned(self) -> bool:
        """Whether it was stopped."""
        return self._ending.is_set()

    def abandon(self) -> None:
        """Stop: checkpoints that are not whole yet will never be."""
        self._ending.set()

    def _work(self) -> None:
        ending = False
        while not self._ending.is_set() and not (ending and not self._waiting):
            try:
                job = self._shards.get(timeout=LOOK)
            except queue.Empty:
                pass
            else:
                ending = ending or job is None
                with suppress(RuntimeError):  # the store is gone: so is the run
                    if job is not None:
                        self._write(*job)
                self._shards.task_done()
            with suppress(RuntimeError):
                self._commit_complete()  # after every shard: on a slow disk the next one is always waiting
                self._look_for_end()

    def _write(self, worker: int, replica: int, shard: Shard) -> None:
        partial = self.shelf.partial(shard.step)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            with shown_alive(partial):
                files = write_shard(partial, self.plan, worker, shard, replica)
            report: dict[str, Any] = {"files": {name: asdict(entry) for name, entry in files.items()}}
        except Exception as error:  # any error: training would wait for ever for a thread that has ended
            report = {"error": said(error)}
        if self.whole:
            self._waiting.setdefault(shard.step, shard.start)
        self.exchange.set(_key(shard.step, worker, replica), json.dumps(report))

    def _commit_complete(self) -> None:
        for step in sorted(self._waiting):
            keys = [_key(step, *place) for place in self._written]
            if (reports := self.exchange.get(keys)) is not None:
                self._commit(step, self._waiting.pop(step), [json.loads(report) for report in reports])
                self.exchange.forget(keys)

    def _look_for_end(self) -> None:
        """In a process without worker 0: the last checkpoint is over when worker 0 says so."""
        if self._last is not None and not self.whole and self.exchange.get([_over(self._last)]) is not None:
            step, self._last = self._last, None
            for observer in self._observers:
                observer.stops(step, None)

    def _commit(self, step: int, start: int, reports: list[dict[str, Any]]) -> None:
        partial = self.shelf.partial(step)
        both = zip(self._written, reports, strict=True)
        failed = [f"{_who(*place)}: {report['error']}" for place, report in both if "error" in report]
        try:
            if failed:
                raise OSError("; ".join(failed))
            files = {name: FileEntry(**entry) for report in reports for name, entry in report["files"].items()}
            complete(partial, self.plan, step, start, self.about, files)
            for observer in self._observers:
                observer.saves(step)
            if not self._anchored:
                self.shelf.anchor()
                self._anchored = True
            self.shelf.commit(step)
        except Exception as error:  # as above
            warn(
                f"the checkpoint at step {step} could not be written: {said(error)}; training goes on, and the "
                "checkpoints before it stay"
            )
            shutil.rmtree(partial, ignore_errors=True)
        else:
            self.shelf.prune(self.keep, step)
        if step == self._last:
            self.exchange.set(_over(step), "")
            for observer in self._observers:
                observer.stops(step, self.shelf.path(step) if self.shelf.path(step).is_dir() else None)


def _who(worker: int, replica: int) -> str:
    return f"worker {worker}" + (f", replica {replica}" if replica else "")


def _key(step: int, worker: int, replica: int) -> str:
    return f"fxpipe/checkpoint/{step}/{worker}/{replica}"


def _over(step: int) -> str:
    return f"fxpipe/checkpoint/{step}/over"
