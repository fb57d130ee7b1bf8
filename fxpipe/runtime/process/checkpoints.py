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
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

from fxpipe.checkpoint.interval import Interval
from fxpipe.checkpoint.manifest import check_replaceable
from fxpipe.checkpoint.shard import CheckpointWriter, Report, Shard, files_of
from fxpipe.checkpoint.shelf import Shelf, shown_alive
from fxpipe.checkpoint.tree import said
from fxpipe.errors import CheckpointError, PeerLost
from fxpipe.files import disk_explained, replacing
from fxpipe.messages import warn
from fxpipe.runtime.process.last_saved import MOST, RUNNING_ON, finish_writing
from fxpipe.runtime.process.minibatch_notes import ahead, several_shapes
from fxpipe.runtime.process.resume import about_run
from fxpipe.runtime.process.rows import WalkedRows
from fxpipe.runtime.process.world import Job
from fxpipe.runtime.wires.board import Board
from fxpipe.runtime.wires.exchange import agreeing, gathered, of_worker_0
from fxpipe.runtime.worker.captures import Agenda, Captures, shard_at_rest
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer
from fxpipe.runtime.worker.outer_step import OuterStep

ELSEWHERE = "choose another folder"
LOOK = 0.05
"""Seconds between two looks for the reports of other processes."""


class Checkpoints(Observer):
    """Makes the checkpoints that a run's options ask for, for the workers of one process, whose rows it follows.

    The first replica of a worker writes what all replicas have; each writes what it alone has.

    Args:
        rows: of this process, with what they have read of the checkpoint that the run goes on from. Where some of
            their workers have something to write, others are left out.
        asked: whether this process was asked to stop the run, after one more.
        observers: are called for each checkpoint.
        then: decides, in worker 0's process, what follows the last checkpoint, given whether it was written.
    """

    def __init__(
        self,
        job: Job[Any],
        rows: WalkedRows,
        asked: Callable[[], bool] = lambda: False,
        observers: Sequence[Observer] = (),
        then: Callable[[bool], str] = lambda saved: "",
    ) -> None:
        options, plan, board, executors, shards = job.options, job.plan, job.world.board, rows.every, rows.shards
        assert options.checkpoint_every is not None
        if job.out is None:
            raise CheckpointError("checkpoints need an output folder", hint="give out=FOLDER for them")
        self.every = Interval.of(options.checkpoint_every)
        writer = CheckpointWriter(plan, about_run(options, job.recipe, plan))
        write = [(e.worker, e.replica) in writer.places for e in executors]
        if any(write):
            executors, shards = list(compress(executors, write)), list(compress(shards, write))
        whole = any((executor.worker, executor.replica) == (0, 0) for executor in executors)
        shelf = Shelf.of(job.out)
        if whole:
            shelf.clear()
        self.writer = ShardWriter(shelf, writer, board, whole, options.keep, observers, then)
        weakref.finalize(self, self.writer.leave).atexit = False
        self._observers, self._store = observers, executors[0].store
        lead = ahead(self._store.demand, several_shapes(plan, options))
        self.agenda = Agenda(board, rows.step, lead, self.every.seconds, whole, asked)
        exact = shards[: len(executors)] if rows.resumed is not None and rows.resumed.exact else ()
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
            for observer in self._observers:
                if observer.each_replica or not executor.replica:
                    observer.cut(executor.worker, shard)
            executor.watch.open("save")
            self.writer.put(executor, shard, last=shard.step == self.agenda.stop)
            executor.watch.close()

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
        version, outer = self._store.version, self._store.part(OuterStep)
        self.agenda.begin(minibatch, version if outer is None else outer.made_by_all(version))

    def due(self, step: int) -> bool:
        """Whether there is a checkpoint at a step."""
        return self.every.due(step) or step in self.agenda


class ShardWriter:
    """Writes the shards of this process's workers, and on worker 0 makes checkpoints of all shards.

    A checkpoint that cannot be written is given up with a warning; training goes on, earlier checkpoints stay.
    """

    def __init__(
        self,
        shelf: Shelf,
        writer: CheckpointWriter,
        board: Board,
        whole: bool,
        keep: int,
        observers: Sequence[Observer],
        then: Callable[[bool], str],
    ) -> None:
        self.shelf, self._writer, self._board, self._whole = shelf, writer, board, whole
        self._keep, self._observers, self._then = keep, observers, then
        self._last: int | None = None
        self._anchored = False  # the names of the folders of checkpoints are synced to the disk
        self._shards: queue.Queue[tuple[int, int, Shard] | None] = queue.Queue(maxsize=len(writer.places))
        self._waiting: dict[int, int] = {}  # steps some of whose reports are missing, and their start
        self._ending, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def put(self, executor: Executor, shard: Shard, last: bool = False) -> None:
        """Have a worker's shard written; wait while earlier ones are being written. After the last the run stops."""
        if last:
            self._last = shard.step
        if (executor.worker, executor.replica) in self._writer.places:
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

    def leave(self) -> None:
        """Nothing more will be put: the thread ends once what it has is written."""
        self._left.set()

    def _work(self) -> None:
        ending = False
        while not self._ending.is_set() and not (ending and not self._waiting):
            try:
                job = self._shards.get(timeout=LOOK)
            except queue.Empty:
                if self._left.is_set():
                    self._ending.set()
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
        report = self._writer.write(shown_alive(self.shelf.partial(shard.step)), worker, replica, lambda: shard)
        if self._whole:
            self._waiting.setdefault(shard.step, shard.start)
        self._board.set(_key(shard.step, worker, replica), json.dumps(report))

    def _commit_complete(self) -> None:
        for step in sorted(self._waiting):
            keys = [_key(step, *place) for place in self._writer.places]
            if (reports := self._board.all(keys)) is not None:
                self._commit(step, self._waiting.pop(step), [json.loads(report) for report in reports])
                self._board.forget(keys)

    def _look_for_end(self) -> None:
        """In a process without worker 0: the last checkpoint is over when worker 0 says so."""
        step = self._last
        if step is not None and not self._whole and (then := self._board.get(_over(step))) is not None:
            self._stop(step, None, then)

    def _stop(self, step: int, saved: Path | None, then: str) -> None:
        self._last = None
        for observer in self._observers:
            observer.stops(step, saved, then)

    def _commit(self, step: int, start: int, reports: list[Report]) -> None:
        folder = self.shelf.partial(step)
        try:
            self._writer.complete(folder, step, start, files_of(reports))
            for observer in self._observers:
                observer.saves(step)
            if not self._anchored:
                self.shelf.anchor()
                self._anchored = True
            self.shelf.commit(step)
        except Exception as error:  # of observers, too
            warn(
                f"the checkpoint at step {step} could not be written: {said(error)}; training goes on, and the "
                "checkpoints before it stay"
            )
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self.shelf.prune(self._keep, step)
        if step == self._last:
            saved = self.shelf.path(step) if self.shelf.path(step).is_dir() else None
            then = self._then(saved is not None)
            self._board.set(_over(step), then)
            self._stop(step, saved, then)


def write_together(folder: Path, job: Job[Any], executors: Sequence[Executor], step: int) -> None:
    """Make a checkpoint of a pipeline at rest: worker 0's process makes the folder, all write, it completes it.

    Raises:
        BuildError, CheckpointError: in all processes, if it cannot be written in one.
    """
    writer = CheckpointWriter(job.plan, about_run(job.options, job.recipe, job.plan))
    fresh: Path | None = None
    with agreeing(), ExitStack() as stack:
        with agreeing():
            if job.process == 0:
                with disk_explained(folder, ELSEWHERE):
                    check_replaceable(folder)
                fresh = stack.enter_context(replacing(folder, ELSEWHERE))
        fresh = of_worker_0(fresh)
        assert fresh is not None
        saved = [e for e in executors if (e.worker, e.replica) in writer.places]
        at, shards = nullcontext(fresh), [(e.worker, e.replica, partial(shard_at_rest, e)) for e in saved]
        reports = gathered([writer.write(at, *shard) for shard in shards])
        files = files_of([*chain.from_iterable(reports)])  # in all processes: each raises the same error
        if job.process == 0:
            writer.complete(fresh, step, step, files)


def _key(step: int, worker: int, replica: int) -> str:
    return f"fxpipe/checkpoint/{step}/{worker}/{replica}"


def _over(step: int) -> str:
    return f"fxpipe/checkpoint/{step}/over"
